"""The live page in a real browser, beside real runs: an experiment and the rehearsal of a federation."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, browser
from command_line import SMALL, holdfast
from test_live import append, change_summary

from holdfast.report.live import LiveServer, open_view

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: no chromium or google-chrome was found"),
]
ROUND = "Number(/round (\\d+)/.exec(document.querySelector('#round')?.textContent)?.[1] ?? -1)"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_else(page: Browser) -> Iterator[None]:
    """No test may leave a complaint, or ask for anything outside this machine."""
    page.complaints.clear()
    page.requests.clear()
    yield
    lost = [
        text for text in page.complaints if "ERR_CONNECTION_REFUSED" not in text
    ]  # when a server has ended
    assert lost == []
    assert all(re.match(r"(http://127\.0\.0\.1:|data:|about:)", url) for url in page.requests)


@contextmanager
def started(*arguments: object, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, ended with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            return found[0]
    raise AssertionError("no address was printed")


GATED = """
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

import holdfast as hf


class Gated(Dataset):
    drawn = 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        Gated.drawn += 1
        while Gated.drawn > int(Path("items").read_text()):
            time.sleep(0.01)
        return torch.full((4,), 2.0 * (i % 2)), i % 2


def everybody(nodes):
    test = (2.0 * torch.arange(2)[:, None].expand(2, 4), torch.arange(2))
    return hf.TrainTest(hf.from_datasets([Gated() for _ in range(nodes)], streaming=True, classes=2), test)
"""
GATED_EXPERIMENT = """
name = "small"
rounds = 60
metrics = ["test_accuracy"]
[problem]
dataset = "gated:everybody"
nodes = 4
model = "linear"
batch_size = 8
[network]
topology = "ring"
[[algorithm]]
name = "local-gecl"
lr = 0.1
[[algorithm]]
name = "gossip"
lr = 0.1
"""


def test_a_real_run_is_seen_growing_until_its_end(page: Browser, tmp_path: Path) -> None:
    """Items are there for half of the first job only, until the page has shown some of its rounds."""
    (tmp_path / "small.toml").write_text(GATED_EXPERIMENT)
    (tmp_path / "gated.py").write_text(GATED)
    (tmp_path / "items").write_text("1000")
    with started("run", "small.toml", "--watch", cwd=tmp_path) as process:
        page.open(address(process))
        page.wait(f"{ROUND} > 10")
        page.wait("document.querySelector('#curves .line').getAttribute('d').length > 100")
        assert page.js("document.title").endswith("% small")
        first = page.js(ROUND)
        assert first < 60
        (tmp_path / "more").write_text("1000000")
        (tmp_path / "more").rename(tmp_path / "items")
        page.wait(f"{ROUND} > {first} || document.querySelector('#progress').dataset.status === 'complete'")
        page.wait("document.querySelector('#progress').dataset.status === 'complete'", patience=240)
        assert page.js("document.querySelector('#round').textContent") == "2 jobs, 2 done"
        rows = "holdfast.series(holdfast.data.curves[1], 'test_accuracy', 'round').x.length"
        assert page.js(rows) == 61
        page.wait("!document.querySelector('#lost').hidden")  # the command has ended, and the page stays
        log = page.js("document.querySelector('#log').innerText")
        assert "local-gecl done after 60 rounds" in log
        assert process.wait(60) == 0
    assert [url for url in page.requests if "data?since=" in url]


def test_watch_follows_a_run_that_is_resumed(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    assert holdfast("run", tmp_path / "small.toml", "--quiet", "--runs-dir", tmp_path / "runs").code == 0
    with started("watch", cwd=tmp_path) as process:  # the newest of runs/
        page.open(address(process))
        page.wait("document.querySelector('#progress').dataset.status === 'complete'")
        [run] = (tmp_path / "runs").iterdir()
        change_summary(run, status="running", round=2)
        page.wait("document.querySelector('#progress').dataset.status === 'running'")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_rows_come_in_and_are_drawn_while_curves_are_hidden(page: Browser, tmp_path: Path) -> None:
    from sample_run import accuracies, job, write_run

    jobs = [job("a", 0, accuracies(0.1, 0.2), "running"), job("b", 0, accuracies(0.1, 0.3))]
    run = write_run(tmp_path / "run", jobs, status="running")
    server = LiveServer(open_view([run]))
    page.open(server.url)
    page.wait("document.querySelectorAll('.entry').length === 2")
    page.click(".entry:nth-child(2)")
    append(run, "a", 0, 16, 0.7)
    page.wait(f"{ROUND} === 16")
    labels = "[...document.querySelectorAll('#curves figure:first-child .curve')].map((c) => c.dataset.label)"
    assert page.js(labels) == ["a"]
    page.js("document.querySelector('#curves .chart').focus()")
    page.press("End")
    assert "70.0 %" in page.js("document.querySelector('.tip:not([hidden])').innerText")
    append(run, "a", 0, 20, 0.8)
    page.wait(f"{ROUND} === 20")  # the tip stays where it is
    assert "70.0 %" in page.js("document.querySelector('.tip:not([hidden])').innerText")
    server.close(patience=0)
    page.wait("!document.querySelector('#lost').hidden")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 360])
def test_the_live_page_fits(page: Browser, troubled_run, width: int, dark: bool) -> None:
    server = LiveServer(open_view([troubled_run.path]))
    page.open(server.url, width=width, dark=dark)
    page.wait("document.querySelector('#curves .chart .line') !== null")
    assert page.overflow == 0
    assert page.js("document.querySelectorAll('b').length") == 0  # a name in this run has markup
    page.open("about:blank#")
    server.close(patience=0)


def test_a_rehearsal_of_a_federation(page: Browser, tmp_path: Path) -> None:
    made = holdfast(
        *("federation", "new", "--nodes", "a=localhost:1,b=localhost:2,c=localhost:3", "--topology", "ring"),
        *(
            "--algorithm",
            "gossip",
            "--input-shape",
            "8",
            "--classes",
            "3",
            "--rounds",
            "40",
            "algorithm.lr=0.1",
        ),
        *("--output", tmp_path / "federation.toml"),
    )
    assert made.code == 0, made.err
    with started("federation", "try", "federation.toml", cwd=tmp_path) as rehearsal:
        home = tmp_path / "rehearsal"
        while not (home / "federation.toml").is_file():
            assert rehearsal.poll() is None
        with started("watch", "rehearsal", cwd=tmp_path) as process:
            page.open(address(process))
            lines = "[...document.querySelectorAll('#members tbody tr')].map((r) => r.cells[0].textContent)"
            assert page.js(lines) == ["a", "b", "c"]
            page.wait(
                f"{ROUND} > 0 || document.querySelector('#progress').dataset.status === 'complete'", 120
            )
            page.wait("document.querySelector('#progress').dataset.status === 'complete'", 240)
            cells = "[...document.querySelectorAll('#members tbody tr')].map((r) => r.cells[1].textContent)"
            page.wait(f"JSON.stringify({cells}) === JSON.stringify(['40/40', '40/40', '40/40'])")
            assert page.js("document.querySelectorAll('.network .nodes circle').length") == 3
            assert page.js("document.querySelectorAll('#curves figure:first-child .curve').length") == 3
            assert "a: finished" in page.js("document.querySelector('#log').innerText")
            assert page.overflow == 0
