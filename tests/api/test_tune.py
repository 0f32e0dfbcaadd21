"""``hf.tune`` and ``holdfast tune``: real runs, interrupted and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import experiment_file, holdfast
from torch import nn

import holdfast as hf

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
Y = X @ torch.tensor([1.0, -2.0, 0.5])


def tune(algorithm: Any = None, **options: Any) -> hf.Tuning:
    """Least squares with full gradients: FedAvg with one local step diverges beyond 2/L."""
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "data": [(X[i::2], Y[i::2]) for i in range(2)],
        "loss": "squared-error",
        "rounds": 6,
        "batch_size": "full",
        "metrics": ["train_loss"],
        **options,
    }
    return hf.tune(algorithm or hf.FedAvg(lr=0.01), **given)


def values(tuning: hf.Tuning) -> list[float]:
    return [trial.value for trial in tuning.trials]


@pytest.fixture(scope="module")
def tuning() -> hf.Tuning:
    return tune(values=[0.02, 0.1], widen=6, rounds=200, evaluate_every=200)


def test_it_finds_the_largest_step_that_does_not_diverge(tuning: hf.Tuning) -> None:
    assert not tuning.on_edge
    assert not tuning.interrupted
    assert tuning.best == hf.FedAvg(lr=tuning.best_value)
    losses = {trial.value: trial.score and trial.score.mean for trial in tuning.trials}
    assert tuning.best_value > 0.1  # it was widened
    assert losses[tuning.best_value] == min(loss for loss in losses.values() if loss is not None)
    for value, loss in losses.items():  # the very figures that train gives
        torch.manual_seed(0)
        if loss is not None:
            alone = hf.train(
                hf.FedAvg(lr=value),
                model=nn.Linear(3, 1),
                data=[(X[i::2], Y[i::2]) for i in range(2)],
                loss="squared-error",
                rounds=200,
                batch_size="full",
                metrics=["train_loss"],
                evaluate_every=200,
            )
            assert alone.history["train_loss"][-1] == loss


def test_what_it_shows(tuning: hf.Tuning) -> None:
    lines = repr(tuning).splitlines()
    assert "lr" in lines[0]
    assert "train loss" in lines[0]
    assert sum("best" in line for line in lines) == 1
    assert list(tuning.to_pandas()["lr"]) == values(tuning)
    [axes] = tuning.plot().axes
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "training loss"
    scored = [trial.value for trial in tuning.trials if trial.score]
    assert any(list(line.get_xdata()) == scored for line in axes.get_lines())


@pytest.mark.filterwarnings("ignore:.*is the (smallest|largest) tried$")
def test_divergence_counts_as_worst() -> None:
    found = tune(values=[1e-3, 1e30], rounds=3, widen=0)
    assert found.best_value == 1e-3
    assert [trial.score is None for trial in found.trials] == [False, True]
    assert "diverged" in found.trials[1].note
    assert "diverged" in repr(found)
    with pytest.warns(RuntimeWarning, match=r"FedAvg: everything diverged or failed, down to 1e\+30"):
        lost = tune(values=[1e30, 1e31], rounds=3, widen=0)
    with pytest.raises(hf.HoldfastError, match="there is no best value"):
        _ = lost.best


def test_a_best_value_on_the_edge_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="the best lr, 0.004, is the largest tried, after 1 widenings"):
        found = tune(values=[0.001, 0.002], widen=1)
    assert values(found) == [0.001, 0.002, 0.004]
    assert found.on_edge


@pytest.mark.filterwarnings("ignore:.*is the (smallest|largest) tried$")
def test_other_parameters_and_functions() -> None:
    found = tune(hf.FedAvg(lr=0.01, local_steps=2), parameter="local_steps", widen=0, rounds=1)
    assert values(found) == [1, 2, 4, 8]
    assert found.best == hf.FedAvg(lr=0.01, local_steps=8)
    named = tune({"name": "fedavg", "lr": 0.01}, values=[0.01, 0.02], widen=0, rounds=1)
    assert named.best == hf.FedAvg(lr=0.02)
    made = tune(lambda lr: hf.FedAvg(lr=lr, local_steps=3), values=[0.01, 0.05], widen=0, rounds=1)
    assert made.best == hf.FedAvg(lr=0.05, local_steps=3)


class InterruptAt(hf.Callback):
    """Ctrl-C in round 2 of job number so-and-so."""

    def __init__(self, job: int) -> None:
        self.left = job

    def on_round(self, job, round) -> None:
        self.left -= round == 0
        if self.left == 0 and round == 2:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore:.*tried, after")
def test_interrupted_and_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"values": [0.001, 0.002], "widen": 2}
    whole = tune(**options)
    part = tune(run_dir=tmp_path / "run", callbacks=[InterruptAt(3)], **options)  # in the first widening
    assert part.interrupted
    assert values(part) == [0.001, 0.002]
    with pytest.raises(hf.HoldfastError, match="holds a tuning; go on with it by resume=True"):
        tune(run_dir=tmp_path / "run", **options)
    with pytest.raises(hf.HoldfastError, match="the tuning began with other arguments: values"):
        tune(run_dir=tmp_path / "run", resume=True, values=[0.001, 0.003])
    with pytest.raises(hf.HoldfastError, match="the run began with other arguments: batch_size"):
        tune(run_dir=tmp_path / "run", resume=True, batch_size=2, **options)
    resumed = tune(run_dir=tmp_path / "run", resume=True, **options)
    assert resumed.trials == whole.trials
    further = tune(run_dir=tmp_path / "run", resume=True, values=[0.001, 0.002], widen=3)
    assert values(further) == [0.001, 0.002, 0.004, 0.008, 0.016]
    outcome = holdfast("resume", tmp_path / "run")
    assert (outcome.code, "is a tuning from Python: continue by calling hf.tune" in outcome.err) == (2, True)
    assert holdfast("report", tmp_path / "run").code == 0
    assert "grid-2: FedAvg lr=0.008" in (tmp_path / "run/report.html").read_text()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"algorithm": 3}, "algorithm: expected a method such as"),
        ({"parameter": "rl"}, "unknown parameter of FedAvg 'rl'"),
        ({"values": [0.1]}, "values: expected two or more different positive numbers"),
        ({"algorithm": hf.FedAvg(lr=hf.cosine(0.1, 6))}, "values: give the values to try"),
        ({"metric": "test_accuracy"}, "unknown metric 'test_accuracy'"),
        ({"mode": "up"}, "mode: should be 'max' or 'min', got 'up'"),
        ({"widen": -1}, "widen: should be a whole number"),
    ],
    ids=str,
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        tune(**changed)


# --- the command line --------------------------------------------------------------------------------------


def trials(folder: Path) -> list[list[str]]:
    with (folder / "trials.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_the_command(tmp_path: Path) -> None:
    file, runs = experiment_file(tmp_path), tmp_path / "runs"
    arguments = ("--values", "0.05,0.1,1e30", "--widen", "0", "rounds=2", "--runs-dir", runs)
    outcome = holdfast("tune", file, *arguments)
    assert outcome.code == 0, outcome.err
    [folder] = runs.iterdir()
    assert folder.name.startswith("small-tune-")
    found = {(row[0], float(row[1])): row[2] for row in trials(folder)[1:]}
    assert set(found) == {(name, value) for name in ("local-gecl", "gossip") for value in (0.05, 0.1, 1e30)}
    assert found["gossip", 1e30] == ""  # it diverged
    assert re.search(r"algorithm.local-gecl.lr=0.\d+ algorithm.gossip.lr=0.\d+\n", outcome.out)
    assert (folder / "tuning.png").stat().st_size > 10_000
    # Nothing is left: the same again, without a run.
    again = holdfast("resume", folder, "-q")
    assert (again.code, again.out) == (0, f"{folder}\n")


def interrupt_when(root: Path, pattern: str) -> threading.Thread:
    """Ctrl-C, from another thread, as soon as a file called like ``pattern`` has a row."""

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not any(file.read_text().count("\n") > 1 for file in root.glob(pattern)):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.slow
def test_the_command_interrupted(tmp_path: Path) -> None:
    few = ('algorithm={name="gossip",lr=0.1}', "evaluate_every=40", 'metrics=["train_loss"]')
    arguments = ("--values", "0.0005,0.001", "--widen", "2", "rounds=40", *few)
    command = ("tune", experiment_file(tmp_path), *arguments, "--runs-dir")
    assert holdfast(*command, tmp_path / "whole").code == 0
    [whole] = (tmp_path / "whole").iterdir()
    thread = interrupt_when(tmp_path, "runs/*/grid-1/metrics.csv")
    outcome = holdfast(*command, tmp_path / "runs")
    thread.join()
    [folder] = (tmp_path / "runs").iterdir()
    assert outcome.code == 130
    assert outcome.err.endswith(f"continue with: holdfast resume {folder}\n")
    assert not (folder / "grid-2").exists()
    assert holdfast("resume", folder).code == 0
    assert trials(folder) == trials(whole)
    assert json.loads((folder / "tuning.json").read_text())["metric"] == "train_loss"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--values", "0.1"], "local-gecl: values: expected two or more different positive numbers"),
        (["--values", "a,b"], "values: expected numbers such as 0.01,0.1,1, got 'a,b'"),
        (["--parameter", "rl"], "unknown parameter of LocalGECL 'rl'"),
        (["--mode", "up"], "mode: should be 'max' or 'min'"),
        (['network.topology=["ring","complete"]'], "network.topology: a tuning sweeps over lr alone"),
    ],
)
def test_mistakes_in_the_command(arguments: list[str], message: str, tmp_path: Path) -> None:
    outcome = holdfast("tune", experiment_file(tmp_path), *arguments, "--runs-dir", tmp_path / "runs")
    assert outcome.code == 2
    assert message in outcome.err
    assert not (tmp_path / "runs").exists()
