"""Interrupted runs: what is saved, and that resuming ends where an uninterrupted run would have."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import SMALL, experiment_file, forked, holdfast, make_plan, rows, run_plan

import holdfast as hf
from holdfast.experiments.plan import Plan
from holdfast.experiments.runner import Interrupted, Runner

# Long enough to be hit by a signal that is sent after the first rows.
LONG = [
    "rounds=100",
    "evaluate_every=5",
    "checkpoint_every=10",
    "problem.dataset=penalised-logistic",
    "problem.partition=groups",
    "problem.loss=logistic",
    "problem.model=linear",
    'metrics=["train_loss"]',
]
EXPERIMENTS = {
    "two algorithms": (),
    "three seeds": ("seeds=[0,1,2]", "rounds=3"),
    "a sweep": ("algorithm.lr=[0.1,0.01]", 'network.topology=["ring","complete"]', "rounds=2"),
    "checkpoints in every round": ("checkpoint_every=1", "evaluate_every=3"),
    "duals that start warm": ('algorithm={name="local-gecl",lr=0.1,warm_start_rounds=2,alpha=0.1}',),
    "a sampled cohort": (
        "network.topology=server",
        "network.cohort=2",
        'algorithm=[{name="scaffold",lr=0.1},{name="fedavg",lr=0.1}]',
    ),
    "one that diverges": ("algorithm.local-gecl.lr=1e30",),
}


class StopAfter(hf.Callback):
    """Sends this process a signal after so many rounds, counted over all jobs."""

    def __init__(self, rounds: int, number: signal.Signals) -> None:
        self.left, self.number = rounds, number

    def on_round(self, job, round) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(self.number)


def run_in_pieces(plan: Plan, root: Path, piece: int) -> tuple[Path, int]:
    """Runs a plan, stopping it by Ctrl-C and SIGTERM in turn every ``piece`` rounds; how often it stopped."""
    runner, stops = Runner.start(plan, root), 0
    while True:
        try:
            runner.execute([StopAfter(piece, (signal.SIGINT, signal.SIGTERM)[stops % 2])])
        except Interrupted:
            stops += 1
            runner = Runner.reopen(Plan.of_tables(plan.origin.raw, None, "cpu"), runner.folder)
        else:
            return runner.folder, stops


def interrupted(root: Path, *overrides: str) -> Path:
    """The directory of a run that was stopped in its third round."""
    runner = Runner.start(make_plan(root, *overrides), root)
    with pytest.raises(Interrupted):
        runner.execute([StopAfter(3, signal.SIGINT)])
    return runner.folder


@pytest.mark.parametrize("overrides", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_a_run_in_pieces_records_what_a_run_in_one_piece_does(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, *overrides)
    whole = run_plan(plan, tmp_path)
    pieces, stops = run_in_pieces(plan, tmp_path, piece=3)
    assert stops >= 1
    assert rows(pieces) == rows(whole)
    for path in (whole / "models").iterdir():
        assert (pieces / "models" / path.name).read_bytes() == path.read_bytes()
    before, after = (json.loads((folder / "summary.json").read_text()) for folder in (whole, pieces))
    assert [job["status"] for job in after["jobs"]] == [job["status"] for job in before["jobs"]]
    assert after["status"] == "complete"


def test_stopping_right_after_the_first_row(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    runner = Runner.start(plan, tmp_path)
    for _ in range(2):
        with pytest.raises(Interrupted):
            runner.execute([StopAfter(1, signal.SIGINT)])
        runner = Runner.reopen(plan, runner.folder)
    runner.execute()
    assert rows(runner.folder) == rows(run_plan(plan, tmp_path))


# --- real processes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    root = tmp_path_factory.mktemp("whole")
    return rows(run_plan(make_plan(root, *LONG), root))


def stop_after_rows(folder: Path, number: signal.Signals, wanted: int) -> tuple[int, str, Path]:
    """Starts the long run and sends it a signal once so many rows are there: exit code, stderr, directory."""
    running = forked("run", experiment_file(folder), *LONG, "-q", cwd=folder)
    deadline = time.monotonic() + 120
    while sum(path.read_text().count("\n") - 1 for path in folder.glob("runs/*/metrics.csv")) < wanted:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(running.pid, number)
    _, err = running.communicate(timeout=60)
    [run] = folder.glob("runs/*")
    return running.returncode, err, run


# The runs in pieces above get both signals.
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_saves_and_stops(number: signal.Signals, tmp_path: Path, uninterrupted) -> None:
    code, err, folder = stop_after_rows(tmp_path, number, wanted=1)
    assert code == 130
    assert err == f"stopped, all is saved; continue with: holdfast resume runs/{folder.name}\n"
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    assert list((folder / "checkpoints").iterdir())
    assert 0 < len(rows(folder)) < len(uninterrupted)
    assert holdfast("resume", folder, "-q") == (0, f"{folder}\n", "")
    assert rows(folder) == uninterrupted
    assert (folder / "report.html").exists()


def test_a_killed_run_can_be_resumed(tmp_path: Path, uninterrupted) -> None:
    wanted = random.Random(1).randint(2, len(uninterrupted) // 2)
    code, _, folder = stop_after_rows(tmp_path, signal.SIGKILL, wanted)
    assert code == -signal.SIGKILL
    # as if it had been hit while it wrote a checkpoint and a row
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / ".000-local-gecl-seed0.safetensors.partial").write_bytes(b"\x08\x00")
    with (folder / "metrics.csv").open("a") as file:
        file.write("local-gecl,0,3")
    assert holdfast("resume", folder, "-q").code == 0
    assert rows(folder) == uninterrupted


def test_resume_finds_the_data_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data" / "own.npz", x_train=rng.random((60, 3)), y_train=rng.integers(0, 2, 60))
    overrides = ['problem.dataset={name="npz",file="own.npz"}', 'metrics=["train_loss"]']
    monkeypatch.chdir(tmp_path)
    plan = Plan.of_file(experiment_file(tmp_path), overrides, Path("data"), "cpu")
    plan.check()
    runner = Runner.start(plan, tmp_path)
    with pytest.raises(Interrupted):
        runner.execute([StopAfter(3, signal.SIGINT)])
    monkeypatch.chdir(tmp_path.parent)
    assert holdfast("resume", runner.folder, "-q").code == 0
    assert [row["round"] for row in rows(runner.folder)] == ["0", "2", "4"] * 2


# --- what resume refuses -----------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    """The one line in which ``resume`` refuses, having changed nothing."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = holdfast("resume", folder)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return outcome.err


def test_resuming_a_complete_run_changes_nothing_that_counts(tmp_path: Path) -> None:
    folder = run_plan(make_plan(tmp_path, 'metrics=["train_loss"]'), tmp_path)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert holdfast("resume", folder, "-q") == (0, f"{folder}\n", "")
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_checkpoint_of_another_experiment_is_refused(tmp_path: Path) -> None:
    mine, other = interrupted(tmp_path), interrupted(tmp_path, "algorithm.lr=0.2")
    name = "checkpoints/000-local-gecl-seed0.safetensors"
    shutil.copy(other / name, mine / name)
    assert f"{mine / name} is a checkpoint of another experiment" in refused(mine)


def test_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    done = run_plan(make_plan(tmp_path), tmp_path)
    folder = interrupted(tmp_path)
    name = "000-local-gecl-seed0.safetensors"
    shutil.copy(done / "models" / name, folder / "checkpoints" / name)
    assert "is a checkpoint of another experiment" in refused(folder)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\xff" * 100])
def test_a_damaged_checkpoint_is_named(content: bytes, tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    path = folder / "checkpoints" / "000-local-gecl-seed0.safetensors"
    path.write_bytes(content)
    assert f"{path} is not a checkpoint of holdfast, or it is damaged" in refused(folder)


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    path = folder / "checkpoints" / "000-local-gecl-seed0.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert str(path) in refused(folder)


def test_an_experiment_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = interrupted(tmp_path)
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("lr = 0.1", "lr = 0.2"))
    assert "experiment.toml was changed since the run began; start a new run" in refused(folder)


def test_rounds_that_were_added_in_the_file_are_run(tmp_path: Path) -> None:
    """As after a kill between the two files that are written first when a run is extended."""
    folder = interrupted(tmp_path)
    path = folder / "experiment.toml"
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 5"))
    assert holdfast("resume", folder, "-q").code == 0
    assert rows(folder) == rows(run_plan(make_plan(tmp_path, "rounds=5"), tmp_path))


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    assert "is not a run directory" in refused(tmp_path / "nothing")
    assert "is not a run directory" in refused(experiment_file(tmp_path, SMALL))
    (tmp_path / "empty").mkdir()
    assert "is not a run directory: experiment.toml is missing" in refused(tmp_path / "empty")
