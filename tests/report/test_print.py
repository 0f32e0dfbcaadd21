"""The report on paper."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_page import Page
from sample_run import DEFAULT_METRICS, job, write_run

from holdfast.experiments.record import load_record
from holdfast.report.html import report_html
from holdfast.report.page_data import CSS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with the usual metrics of three algorithms."""
    folder = tmp_path_factory.mktemp("print")
    rows = [{"round": r, **dict.fromkeys(DEFAULT_METRICS, 0.51234 + 0.01 * r)} for r in (0, 10, 20)]
    jobs = [job(name, 0, rows) for name in ("local-gecl", "d-scaffold", "gossip")]
    record = load_record(write_run(folder / "run", jobs, metrics=tuple(DEFAULT_METRICS)))
    (folder / "report.html").write_text(report_html([record]), encoding="utf-8")
    return folder / "report.html"


def test_the_printed_table_shrinks_with_its_columns(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    columns = len(Page(text).tables[0][0])
    assert f'<table class="results" style="--columns:{columns}">' in text
    paper = CSS[CSS.index("@media print") :]
    assert re.search(r"\.results \{ font-size: min\([\d.]+pt, \d+pt / var\(--columns\)\); \}", paper)
    assert ".figures { grid-template-columns: 1fr 1fr;" in paper


@pytest.fixture(scope="module")
def swept_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with twelve curves of four algorithms, and the best step size of each at the edge."""
    folder, axis = tmp_path_factory.mktemp("print"), "algorithm.lr"
    jobs = [
        job(
            name,
            seed,
            [{"round": r, **dict.fromkeys(DEFAULT_METRICS, lr * (r + seed))} for r in (0, 10)],
            axes={axis: lr},
        )
        for name in ("local-gecl", "d-scaffold", "led", "gossip")
        for lr in (0.01, 0.02, 0.05)
        for seed in (0, 1)
    ]
    record = load_record(write_run(folder / "run", jobs, metrics=tuple(DEFAULT_METRICS), axes=(axis,)))
    text = report_html([record])
    assert "Sweep over lr" in text
    (folder / "report.html").write_text(text, encoding="utf-8")
    return folder / "report.html"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to print")
@pytest.mark.parametrize("which", ["report", "swept_report"])
def test_a_printed_report_has_two_pages(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    report: Path = request.getfixturevalue(which)
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
    target = tmp_path / "report.pdf"
    subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--print-to-pdf={target}", report.as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pages = re.findall(rb"/Type\s*/Page\b", target.read_bytes())
    assert len(pages) == 2
    if shutil.which("pdftotext"):
        printed = subprocess.run(
            ["pdftotext", target, "-"], check=True, capture_output=True, text=True
        ).stdout
        assert {"consensus", "traffic", "gradients", "time"} <= set(printed.split())
