"""The HTML report of small runs whose numbers are known."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from report_page import Page
from sample_run import job, two_algorithms, write_run

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RunRecord, load_record
from holdfast.report.html import report_html, write_plots, write_report
from holdfast.report.sections import subtitles
from holdfast.report.verdict import verdict


@pytest.fixture(scope="module")
def reports(good_run: RunRecord, troubled_run: RunRecord) -> dict[str, str]:
    """The HTML of a good_run run, of a troubled_run one, and of both overlaid."""
    runs = {"good": [good_run], "troubled": [troubled_run], "both": [good_run, troubled_run]}
    return {name: report_html(records) for name, records in runs.items()}


def test_results_in_the_report(good_run: RunRecord, reports: dict[str, str]) -> None:
    page = Page(reports["good"])
    head, gecl, gossip = page.tables[0]
    assert dict(zip(head, gecl, strict=True)) == {
        "algorithm": "local-gecl",
        "seeds": "2",
        "round": "20",
        "accuracy (%)": "92.0± 2.8",
        "best accuracy (%)": "92.0± 2.8",
        "train loss": "0.08± 0.028",
        "consensus": "0.01± 0",
        "traffic": "20.00 MiB",
        "gradients": "2,000",
        "time": "10.0 s",
    }
    assert dict(zip(head, gossip, strict=True))["traffic"] == "10.00 MiB"
    assert dict(zip(head, gossip, strict=True))["best accuracy (%)"] == "60.0± 0.0"
    assert escape(verdict([good_run])) in reports["good"]


@pytest.mark.parametrize("name", ["good", "troubled", "both"])
def test_report_is_one_sound_file(name: str, reports: dict[str, str]) -> None:
    text = reports[name]
    page = Page(text)
    assert not re.search(r"https?:", text)
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)  # besides the data
    assert [value for tag, _, value in page.attributes if tag == "script"] == ["application/json", "data"]
    [allowed] = re.findall(r"script-src 'sha256-([^']+)';", text)
    assert [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts] == [
        allowed
    ]
    assert "default-src 'none'" in text
    assert not [tag for tag, name, _ in page.attributes if name in ("src", "srcset") or tag == "link"]
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    references = [value for _, name, value in page.attributes if name.endswith("href")]
    references += re.findall(r"url\((#[^)]*)\)", text)
    assert references
    assert {reference.removeprefix("#") for reference in references} <= set(ids)


def test_names_from_outside_are_escaped(reports: dict[str, str]) -> None:
    text = reports["troubled"]
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;gossip lr=0.1" in text
    assert "NaN: &lt;smaller&gt; lr" in text
    assert "a &lt;b&gt; &amp; c" in text  # from environment.json


def test_report_says_what_went_wrong(reports: dict[str, str]) -> None:
    page = Page(reports["troubled"])
    told = " ".join(page.words)
    assert "This run was interrupted: of 8 jobs, 4 done, 1 diverged, 1 unfinished, 2 not started;" in told
    assert "<b>&gossip lr=0.1 seed 1 diverged: NaN" in told
    lines = {line[0]: line for line in page.tables[0]}
    assert "<b>&gossip lr=0.01" + "2 of 2 seeds unfinished" in lines
    assert lines["<b>&gossip lr=0.1" + "1 of 2 seeds diverged at round 20"][2] == "10/20"


def test_report_of_two_runs(good_run: RunRecord, tmp_path: Path) -> None:
    other = load_record(two_algorithms(tmp_path / "other", name="other"))
    page = Page(report_html([good_run, other]))
    assert [line[0] for line in page.tables[0][1:]] == [
        "sample: local-gecl",
        "sample: gossip",
        "other: local-gecl",
        "other: gossip",
    ]
    assert "holdfast run good/experiment.toml" in " ".join(page.words)
    assert "holdfast run other/experiment.toml" in " ".join(page.words)


def test_report_of_a_regression_on_a_server(tmp_path: Path) -> None:
    rows = [{"round": 0, "train_loss": 2.0}, {"round": 20, "train_loss": 0.5}]
    record = load_record(
        write_run(
            tmp_path / "run",
            [job("fedavg", 0, rows)],
            metrics=("train_loss",),
            partition="node,samples\n0,7\n1,5\n",
            network="i,j,weight\n",
        )
    )
    told = " ".join(Page(report_html([record])).words)
    assert "All nodes talk to the server only." in told
    assert "samples of each class" not in told
    assert "accuracy" not in told


def test_the_subtitle_says_by_what_a_table_was_divided(good_run: RunRecord) -> None:
    assert "iid partition" in subtitles([_of_data("digits", good_run, None)])
    names = ["Ash", "Birch", "Cedar"]
    table = {"name": "csv", "file": "train.csv", "target": "ill", "node": "hospital"}
    told = subtitles([_of_data(table, good_run, names)])
    assert "ill in train.csv · divided by hospital" in told
    assert "csv(" not in told
    assert "iid" not in told
    assert "divided by the data&#x27;s own nodes" in subtitles([_of_data("mine:data", good_run, names)])


def _of_data(dataset: object, run: RunRecord, names: list[str] | None) -> RunRecord:
    assert run.partition is not None
    config = {"problem": {"dataset": dataset, "partition": "iid"}}
    return replace(run, config=config, partition=replace(run.partition, names=names))


def test_write_report_and_plots(good_run: RunRecord, tmp_path: Path) -> None:
    write_report([good_run], tmp_path / "report.html")
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).tables
    write_plots(good_run, tmp_path / "plots")
    write_report([good_run], tmp_path / "report.html", plots=tmp_path / "beside the report")
    for path in (tmp_path / "plots").iterdir():
        assert (tmp_path / "beside the report" / path.name).read_bytes() == path.read_bytes()
    stems = [
        "consensus",
        "network",
        "partition",
        "test_accuracy",
        "test_accuracy_by_payload_bytes",
        "train_loss",
    ]
    # No plot against gradients: a round takes as many in both algorithms.
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(
        f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")
    )
    with pytest.raises(HoldfastError, match="cannot write the report"):
        write_report([good_run], tmp_path / "nowhere" / "report.html")
