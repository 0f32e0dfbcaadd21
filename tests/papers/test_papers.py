"""Papers as executable claims, tried on a made-up paper: what is run, and what is picked up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import holdfast
from tiny_paper import PRESET

import holdfast as hf
from holdfast.experiments.record import load_record
from holdfast.experiments.runner import Runner
from holdfast_papers.base import (
    Circumstances,
    Paper,
    Preset,
)
from holdfast_papers.catalogue import MODULES
from holdfast_papers.execution import Task, locked


def test_the_papers_and_their_experiments_are_listed(paper: Paper) -> None:
    outcome = holdfast("paper")
    assert outcome.code == 0
    assert all(name in outcome.out for name in (*MODULES, "A tiny paper", "squares", "(2 claims)"))


def test_a_run_leaves_verdict_figure_and_run_directory(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny/curves")
    assert outcome.code == 0
    assert "PASS" in outcome.out
    assert "NOT COMPARABLE" in outcome.out
    folder = tmp_path / "runs/papers/tiny/curves/small"
    assert (folder / "figure.png").stat().st_size > 5000
    text = (folder / "verdict.md").read_text()
    assert "| It learns | yes |" in text
    assert "`seeds=[0]`" in text
    (run,) = (folder / "curves").iterdir()
    assert {row["round"] for row in load_record(run).rows} == {0, 2, 4}
    assert not list((run / "checkpoints").iterdir())


def test_full_scale_is_the_preset_as_it_stands(paper: Paper, tmp_path: Path) -> None:
    assert holdfast("paper", "run", "tiny/curves", "--scale", "full").code == 0
    (run,) = (tmp_path / "runs/papers/tiny/curves/full/curves").iterdir()
    assert {(row["seed"], row["round"]) for row in load_record(run).rows} == {
        (seed, r) for seed in (0, 1) for r in (0, 2, 4, 6)
    }


def test_a_failed_claim_is_exit_code_1(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny/squares")
    assert outcome.code == 1
    assert "FAIL" in outcome.out
    verdict = json.loads((tmp_path / "runs/papers/tiny/squares/small/verdict.json").read_text())
    assert verdict["claims"][0]["verdict"] == "FAIL"
    assert verdict["table"] == [["n", "n²"], [["1", "1"], ["2", "4"], ["3", "9"]]]


def test_programs_read_papers_and_verdicts(paper: Paper) -> None:
    [tiny] = [one for one in json.loads(holdfast("paper", "--json").out) if one["id"] == "tiny"]
    assert [experiment["id"] for experiment in tiny["experiments"]] == [one.id for one in paper.experiments]
    outcome = holdfast("paper", "run", "tiny/squares", "--json")
    [judgement] = json.loads(outcome.out)
    assert outcome.code == 1
    assert judgement["experiment"] == "squares"
    assert judgement["claims"][0]["verdict"] == "FAIL"
    assert "FAIL" in outcome.err  # what people read
    assert "after the command: holdfast paper run --json" in holdfast("paper", "--json", "run", "tiny").err


def test_a_finished_run_is_not_repeated_and_a_changed_preset_is_run_anew(
    paper: Paper, tmp_path: Path
) -> None:
    holdfast("paper", "run", "tiny/curves")
    folder = tmp_path / "runs/papers/tiny/curves/small/curves"
    (run,) = folder.iterdir()
    before = (run / "metrics.csv").stat().st_mtime_ns
    holdfast("paper", "run", "tiny/curves")
    assert list(folder.iterdir()) == [run]
    assert (run / "metrics.csv").stat().st_mtime_ns == before
    (paper.folder / "curves.toml").write_text(PRESET.replace("lr = 0.1", "lr = 0.2"))
    holdfast("paper", "run", "tiny/curves")
    assert len(list(folder.iterdir())) == 2


@pytest.mark.slow
def test_seeds_that_were_run_one_by_one_are_joined(paper: Paper, tmp_path: Path) -> None:
    holdfast("paper", "run", "tiny/curves", "--scale", "full", "--runs-dir", "whole")
    one = holdfast("paper", "run", "tiny/curves", "--scale", "full", "--seed", 1)
    assert (one.code, "PASS" in one.out) == (0, False)
    folder = tmp_path / "runs/papers/tiny/curves/full"
    assert not (folder / "verdict.json").exists()
    assert holdfast("paper", "run", "tiny/curves", "--scale", "full").code == 0  # runs the other seed too
    assert len(list((folder / "curves").glob("*/summary.json"))) == 2
    whole = tmp_path / "whole/papers/tiny/curves/full"
    verdicts = [json.loads((place / "verdict.json").read_text()) for place in (folder, whole)]
    assert verdicts[0]["claims"] == verdicts[1]["claims"]
    assert verdicts[0]["seeds"] == [2]


def test_a_seed_that_a_preset_has_not_is_an_error(paper: Paper) -> None:
    assert (
        "there is no seed 7, only [0, 1]"
        in holdfast("paper", "run", "tiny/curves", "--scale", "full", "--seed", 7).err
    )


def test_a_seed_is_not_joined_while_another_process_runs_it(paper: Paper, tmp_path: Path) -> None:
    full = ("paper", "run", "tiny/curves", "--scale", "full")
    holdfast(*full, "--seed", 0)
    with locked(tmp_path / "runs/papers/tiny/curves/full/curves", ".lock-1"):
        outcome = holdfast(*full)
    assert (outcome.code, "another process is running" in outcome.err) == (2, True)


def finished_run(tmp_path: Path) -> Path:
    """The run directory of tiny/curves, run to its end."""
    assert holdfast("paper", "run", "tiny/curves").code == 0
    (run,) = (tmp_path / "runs/papers/tiny/curves/small/curves").iterdir()
    return run


def test_a_finished_run_with_rows_missing_is_an_error_and_no_verdict(paper: Paper, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    verdict = run.parent.parent / "verdict.json"
    verdict.unlink()
    text = (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text(text[: text.rstrip("\n").rfind("\n") + 1])
    outcome = holdfast("paper", "run", "tiny/curves")
    assert outcome.code == 2
    assert outcome.err.startswith("error: ")
    assert f"{run.name}: metrics.csv is damaged: 'gossip inf 0' is done, but its last round, 4" in outcome.err
    assert not any(word in outcome.out for word in ("PASS", "FAIL"))
    assert not verdict.exists()


def test_a_damaged_summary_names_the_folder_to_delete(paper: Paper, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for content in ("", "{", "[]", '{"status": "complete"}'):
        (run / "summary.json").write_text(content)
        outcome = holdfast("paper", "run", "tiny/curves")
        assert outcome.code == 2
        assert len(outcome.err.strip().splitlines()) == 1
        assert "summary.json is damaged" in outcome.err
        assert outcome.err.strip().endswith(f"delete {run.relative_to(tmp_path)} to run it again")
    shutil.rmtree(run)
    finished_run(tmp_path)


def test_a_finished_experiment_is_judged_again_without_its_data(paper: Paper, tmp_path: Path) -> None:
    paper.experiments[2] = replace(paper.experiment("absent"), presets=[Preset("absent", ["rounds=2"])])
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
        write_images(folder / "mnist.npz")
    assert holdfast("paper", "run", "tiny/absent").code == 2
    first = holdfast("paper", "run", "tiny/absent", "--data-dir", here)
    assert first.code == 0
    verdict = tmp_path / "runs/papers/tiny/absent/small/verdict.json"
    verdict.unlink()
    again = holdfast("paper", "run", "tiny/absent")
    assert (again.code, again.err) == (0, "")
    assert verdict.exists()
    assert len(list((verdict.parent / "absent").iterdir())) == 1
    same = holdfast("paper", "run", "tiny/absent", "--data-dir", "here")
    other = holdfast("paper", "run", "tiny/absent", "--data-dir", elsewhere)
    notes = [f"made with the data in {here};" in " ".join(o.out.split()) for o in (first, again, same, other)]
    assert notes == [False, False, False, True]


def write_images(file: Path) -> None:
    """A few random images in the place of MNIST."""
    chance = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for part, size in (("train", 60), ("test", 20)):
        arrays[f"x_{part}"] = chance.integers(0, 256, (size, 4, 4), np.uint8)
        arrays[f"y_{part}"] = np.arange(size, dtype=np.uint8) % 10
    np.savez(file, **arrays)


class StopAfterFirstJob(hf.Callback):
    """A view that breaks a run off, as a second Ctrl-C does."""

    def on_train_end(self, *given: object) -> None:
        raise KeyboardInterrupt


def test_a_run_that_was_stopped_is_continued(paper: Paper, tmp_path: Path) -> None:
    folder = tmp_path / "runs/papers/tiny/curves/small/curves"
    experiment = paper.experiment("curves")
    task = Task(paper, experiment, experiment.presets[0], Circumstances("small", "cpu", None), folder)
    begun = Runner.start(task.plan(), folder)
    with pytest.raises(KeyboardInterrupt):
        begun.execute([StopAfterFirstJob()])
    first = [row["seconds"] for row in load_record(begun.folder).rows]
    assert len(first) == 3
    assert holdfast("paper", "run", "tiny/curves").code == 0
    assert list(folder.iterdir()) == [begun.folder]
    record = load_record(begun.folder)
    assert record.summary["status"] == "complete"
    assert [row["seconds"] for row in record.rows[:3]] == first


def test_missing_data_are_all_named_before_anything_runs(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny")
    assert outcome.code == 2
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: tiny/absent: dataset 'mnist' not found")
    assert "put the four IDX files" in lines[0]
    assert "dataset 'cifar10' not found" in lines[1]
    assert not (tmp_path / "runs").exists()


def test_two_processes_do_not_run_the_same_experiment(paper: Paper, tmp_path: Path) -> None:
    with locked(tmp_path / "runs/papers/tiny/curves/small"):
        outcome = holdfast("paper", "run", "tiny/curves")
    assert outcome.code == 2
    assert "another process is running this experiment" in outcome.err


@pytest.mark.parametrize(
    ("wanted", "near"), [("local-gcl", "local-gecl"), ("tiny/curve", "curves"), ("tiny/x", "squares")]
)
def test_an_unknown_name_is_one_line_with_the_nearest(paper: Paper, wanted: str, near: str) -> None:
    outcome = holdfast("paper", "run", wanted)
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1
    assert near in outcome.err
