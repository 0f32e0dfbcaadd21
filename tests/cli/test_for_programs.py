"""What programs read: ``--json``, final figures in ``summary.json``, run names, completion in a shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.app import app
from holdfast.core.errors import HoldfastError

SMALL = ["rounds=2", "problem.nodes=3", "algorithm.local_steps=1"]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The folder of the runs, and what ``holdfast run --json`` printed of the one in it."""
    runs = tmp_path_factory.mktemp("runs")
    done = CliRunner().invoke(app, ["run", *SMALL, "--runs-dir", str(runs), "--name", "first", "--json"])
    assert done.exit_code == 0, done.output
    return runs, json.loads(done.stdout)


def test_a_run_prints_its_figures(printed: tuple[Path, dict[str, object]]) -> None:
    runs, shown = printed
    assert shown["run"] == str(runs / "first")
    assert shown["status"] == "complete"
    assert shown["report"] == str(runs / "first" / "report.html")
    assert (runs / "first" / "report.html").is_file()
    results = shown["results"]
    assert isinstance(results, list)
    assert [line["label"] for line in results] == ["local-gecl", "d-scaffold", "gossip"]
    summary = json.loads((runs / "first" / "summary.json").read_text())
    for line, job in zip(results, summary["jobs"], strict=True):
        assert line["round"] == job["final"]["round"] == 2
        # One seed: the mean is that seed's figure, and there is no spread.
        assert line["figures"]["train_loss"] == {"mean": job["final"]["train_loss"], "std": None}
        assert job["final"]["train_loss"] > 0


def test_runs_are_listed(printed: tuple[Path, dict[str, object]]) -> None:
    runs, shown = printed
    listed = CliRunner().invoke(app, ["list", "runs", "--runs-dir", str(runs), "--json"])
    [entry] = json.loads(listed.stdout)
    assert entry == {key: value for key, value in shown.items() if key != "report"}
    table = CliRunner().invoke(app, ["list", "runs", "--runs-dir", str(runs)], env={"COLUMNS": "40"})
    assert str(runs / "first") in table.stdout  # in one piece, however narrow the terminal
    wide = CliRunner().invoke(app, ["list", "runs", "--runs-dir", str(runs)], env={"COLUMNS": "200"})
    assert "3 jobs, 3 done" in wide.stdout


def test_a_damaged_run_does_not_hide_the_others(
    printed: tuple[Path, dict[str, object]], tmp_path: Path
) -> None:
    runs, _ = printed
    shutil.copytree(runs / "first", tmp_path / "sound")
    shutil.copytree(runs / "first", tmp_path / "tuning" / "grid-0")
    shutil.copytree(runs / "first", tmp_path / "damaged")
    (tmp_path / "damaged" / "summary.json").write_text("{")
    listed = CliRunner().invoke(app, ["list", "runs", "--runs-dir", str(tmp_path), "--json"])
    paths = {entry["run"] for entry in json.loads(listed.stdout)}
    assert paths == {str(tmp_path / "sound"), str(tmp_path / "tuning" / "grid-0")}
    assert "left out" in listed.stderr
    assert "summary.json is damaged" in listed.stderr


def test_a_report_says_where_it_is(printed: tuple[Path, dict[str, object]], tmp_path: Path) -> None:
    runs, shown = printed
    target = tmp_path / "again.html"
    done = CliRunner().invoke(app, ["report", str(runs / "first"), "-o", str(target), "--json"])
    read = json.loads(done.stdout)
    assert read["report"] == str(target)
    assert read["runs"][0]["results"] == shown["results"]


def test_a_name_is_given_once(printed: tuple[Path, dict[str, object]]) -> None:
    runs, _ = printed
    again = CliRunner().invoke(app, ["run", *SMALL, "--runs-dir", str(runs), "--name", "first"])
    assert isinstance(again.exception, HoldfastError)
    assert "exists already" in str(again.exception)
    away = CliRunner().invoke(app, ["run", *SMALL, "--runs-dir", str(runs), "--name", "../first"])
    assert isinstance(away.exception, HoldfastError)
    assert sorted(path.name for path in runs.iterdir()) == ["first"]


def test_inspect_for_programs(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", *SMALL, "--json", "--output", str(tmp_path / "pictures")])
    read = json.loads(done.stdout)
    assert sum(read["samples"]) + read["unused_samples"] == 1437  # the digits' training set
    by_label = {line["label"]: line for line in read["algorithms"]}
    assert by_label["local-gecl"]["vectors_per_link"] == 2
    # Two vectors of float32 over each of the six directed links.
    assert by_label["local-gecl"]["bytes_per_round"] == 2 * 6 * 4 * read["parameters"]
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize(
    ("typed", "offered"), [("holdfast rep", {"report"}), ("holdfast list top", {"topologies"})]
)
def test_a_shell_completes(typed: str, offered: set[str]) -> None:
    words = typed.split()
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1), "_HOLDFAST_COMPLETE": "complete_bash"}
    code = "from holdfast.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True
    )
    assert set(done.stdout.split()) == offered
