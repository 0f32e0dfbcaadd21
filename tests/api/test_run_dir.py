"""``hf.train`` into a run directory: killed at any moment and resumed, it ends as if nothing had happened."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import holdfast
from forks import Forked, python
from torch import nn
from toy_channels import Grid

import holdfast as hf
from holdfast.experiments.record import load_record

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def train(run_dir: Path | None = None, **options: Any) -> hf.TrainResult:
    given: dict[str, Any] = {
        "algorithm": hf.LocalGECL(lr=0.1, local_steps=2, optimizer=hf.Momentum(0.9)),
        "model": network(),
        "data": [(X[i::4], Y[i::4]) for i in range(4)],
        "topology": "ring",
        "rounds": 10,
        "batch_size": 4,
        "evaluate_every": 3,
        "checkpoint_every": 2,
        "test": (X, Y),
        "run_dir": run_dir,
        **options,
    }
    return hf.train(given.pop("algorithm"), **given)


def rows(result: hf.TrainResult) -> list[dict[str, float]]:
    """All figures but the wall times."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in result.history.rows]


def same(one: hf.TrainResult, other: hf.TrainResult) -> bool:
    return torch.equal(one.models, other.models) and rows(one) == rows(other) and one.status == other.status


class At(hf.Callback):
    """Does something after so many rounds."""

    def __init__(self, round: int, action: Any) -> None:
        self.round, self.action = round, action

    def on_round(self, job, round) -> None:
        if round == self.round:
            self.action()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("the machine is gone")


def test_a_run_directory_changes_nothing(tmp_path: Path) -> None:
    assert same(train(tmp_path / "run"), train())


@pytest.mark.parametrize(
    ("stop", "options"),
    [
        (1, {}),
        (5, {}),
        (8, {}),
        (5, {"channel": Grid()}),
        (5, {"algorithm": hf.SCAFFOLD(lr=0.1, local_steps=2), "topology": "server", "cohort": 2}),
        (5, {"algorithm": hf.Gossip(lr=hf.cosine(0.2, 10))}),
        (5, {"algorithm": hf.LocalGECL(lr=0.01, local_steps=2, optimizer=hf.AdamW(keep=True))}),
    ],
    ids=["before", "between", "on a checkpoint", "a channel with memory", "a cohort", "a schedule", "AdamW"],
)
def test_resumed_is_the_same_to_the_last_bit(stop: int, options: dict[str, Any], tmp_path: Path) -> None:
    """By Ctrl-C, which saves, and by an error between two checkpoints, which does not."""
    whole = train(**options)
    half = train(tmp_path / "a", callbacks=[At(stop, interrupt)], **options)
    assert (half.status, half.history["round"][-1]) == ("interrupted", 3 * (stop // 3))
    assert repr(half).startswith(f"TrainResult(interrupted, last measured after round {3 * (stop // 3)}: ")
    with pytest.raises(RuntimeError, match="machine is gone"):
        train(tmp_path / "b", callbacks=[At(stop, fail)], **options)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert same(train(folder, resume=True, **options), whole)
        assert load_record(folder).summary["status"] == "complete"


SCRIPT = """
import os, signal, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from test_run_dir import At, train
train(Path({folder!r}), callbacks=[At(9, lambda: os.kill(os.getpid(), signal.SIGKILL))], resume=True)
"""


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """SIGKILL after round 9, in a process of its own; the last checkpoint is of round 8."""
    paths, folder = [str(Path(__file__).parent), *sys.path], str(tmp_path / "run")
    killed = Forked(tmp_path, python, SCRIPT.format(paths=paths, folder=folder))
    _, err = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, err
    assert load_record(tmp_path / "run").summary["status"] == "running"
    assert same(train(tmp_path / "run", resume=True), train())


def test_killed_before_the_first_round(tmp_path: Path) -> None:
    """summary.json is written last: without it there is no run yet, and what lies there is written anew."""
    whole = train(tmp_path / "run")
    for name in ("summary.json", "checkpoints", "models"):
        (tmp_path / "run" / name).rename(tmp_path / name)
    (tmp_path / "run/.summary.json.partial").write_bytes(b"{")
    assert same(train(tmp_path / "run", resume=True), whole)


def test_a_finished_run_is_given_back_as_it_ended(tmp_path: Path) -> None:
    once = train(tmp_path / "run")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/checkpoints").iterdir()}
    seen: list[int] = []
    again = train(tmp_path / "run", resume=True, callbacks=[At(10, lambda: seen.append(1))])
    assert same(again, once)
    assert not seen
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "run/checkpoints").iterdir()}


def test_so_is_one_that_diverged_or_was_stopped(tmp_path: Path) -> None:
    def stop() -> None:
        raise hf.Stop("enough")

    stopped = train(tmp_path / "stopped", callbacks=[At(5, stop)])
    assert stopped.status == "stopped"
    assert same(train(tmp_path / "stopped", resume=True), stopped)
    huge = {"algorithm": hf.FedAvg(lr=1e38, local_steps=2), "topology": "server"}
    with pytest.warns(RuntimeWarning, match="FedAvg diverged"):
        diverged = train(tmp_path / "diverged", **huge)
    assert diverged.history["round"][0] == 0
    with pytest.warns(RuntimeWarning, match="FedAvg diverged"):
        again = train(tmp_path / "diverged", resume=True, **huge)
    assert again.status == "diverged"
    assert again.history["round"] == diverged.history["round"]


def test_early_stopping_counts_on(tmp_path: Path) -> None:
    """A resumed job stops where an uninterrupted one does: patience is not given anew."""

    def patience() -> hf.EarlyStopping:
        return hf.EarlyStopping("train_loss", 4, min_delta=1.0)

    options = {"rounds": 30, "evaluate_every": 1}
    whole = train(callbacks=[patience()], **options)
    assert (whole.status, whole.history["round"][-1]) == ("stopped", 4)
    train(tmp_path / "run", callbacks=[patience(), At(2, interrupt)], **options)
    assert same(train(tmp_path / "run", resume=True, callbacks=[patience()], **options), whole)


# --- refusals ----------------------------------------------------------------------------------------------


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path / "run", callbacks=[At(3, interrupt)])
    with pytest.raises(hf.HoldfastError, match=r"run_dir: .* holds a run; go on with it by resume=True"):
        train(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("")
    with pytest.raises(hf.HoldfastError, match=r"run_dir: .*mine exists and is no run of holdfast"):
        train(tmp_path / "mine", resume=True)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(hf.HoldfastError, match="resume: give the run_dir of the run to go on with"):
        train(resume=True)
    with pytest.raises(hf.HoldfastError, match="resume: give the run_dir"):
        hf.compare({"a": hf.FedAvg(lr=0.1)}, model=network, data=[(X, Y)], rounds=1, resume=True)
    train(tmp_path / "new", resume=True, rounds=1)  # a script may say so from the start


FROZEN = network()
FROZEN[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"batch_size": 5}, "batch_size"),
        ({"rounds": 11, "l2": 0.1}, "l2, rounds"),
        ({"algorithm": hf.LocalGECL(lr=0.1, local_steps=2)}, "algorithm"),
        ({"algorithm": hf.LocalGECL(lr=lambda r: 0.1, local_steps=2)}, "algorithm"),
        ({"data": [(X[i::4] + 1e-6, Y[i::4]) for i in range(4)]}, "data"),
        ({"model": nn.Linear(4, 2)}, "model"),
        ({"model": FROZEN}, "model"),
        ({"topology": "complete"}, "topology"),
        ({"seed": 1}, "seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_setting_is_refused(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    train(tmp_path / "run", callbacks=[At(3, interrupt)])
    with pytest.raises(
        hf.HoldfastError, match=rf"the run began with other arguments: {named}; give the same"
    ):
        train(tmp_path / "run", resume=True, **changed)


def test_initial_weights_may_be_drawn_anew(tmp_path: Path) -> None:
    """A script that seeds nothing can be resumed: what was trained is in the checkpoint."""
    whole = train()
    train(tmp_path / "run", callbacks=[At(5, interrupt)])
    other = network()
    nn.init.normal_(other[0].weight)
    assert same(train(tmp_path / "run", resume=True, model=other), whole)


# --- the command line --------------------------------------------------------------------------------------


def test_the_command_line_reports_it_and_does_not_resume_it(tmp_path: Path) -> None:
    train(tmp_path / "run", callbacks=[At(5, interrupt)])
    outcome = holdfast("resume", tmp_path / "run")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "is a run from Python: continue by calling hf.train with run_dir=" in outcome.err
    train(tmp_path / "run", resume=True)
    outcome = holdfast("report", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert "LocalGECL" in outcome.out
    page = (tmp_path / "run/report.html").read_text()
    assert "Made in Python by <code>hf.train</code>" in page
    assert "holdfast run" not in page
    assert json.loads((tmp_path / "run/summary.json").read_text())["origin"] == "hf.train"
