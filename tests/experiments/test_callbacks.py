"""Callbacks see the same of ``hf.train`` as of a run directory, may stop it, and their errors surface."""

from __future__ import annotations

import io
import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import holdfast, make_plan
from rich.console import Console
from torch import nn

import holdfast as hf
from holdfast.experiments.record import load_record
from holdfast.experiments.runner import Runner

X, Y = torch.linspace(0, 1, 24).reshape(12, 2), torch.arange(12) % 3
DATA = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def train(*callbacks: hf.Callback, rounds: int = 4, **options: Any) -> hf.TrainResult:
    torch.manual_seed(0)
    model, method = nn.Linear(2, 3), options.pop("algorithm", hf.FedAvg(lr=0.1))
    return hf.train(method, model=model, data=DATA, rounds=rounds, callbacks=callbacks, **options)


class Notes(hf.Callback):
    """Writes down everything that it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, job, simulation) -> None:
        self.seen.append(("started", job.rounds, simulation.round))

    def on_prepared(self, job, how) -> None:
        self.seen.append(("prepared", bool(how)))

    def on_evaluate(self, job, row) -> None:
        self.seen.append(("row", row["round"]))
        self.rows.append(row)

    def on_round(self, job, round) -> None:
        self.seen.append(("round", round))

    def on_train_end(self, job, outcome) -> None:
        self.seen.append(("ended", outcome.status))


class StopAt(hf.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, job, round) -> None:
        if round == self.round:
            raise hf.Stop(f"round {round} is enough")


class InterruptAt(hf.Callback):
    def __init__(self, round: int, times: int = 1) -> None:
        self.round, self.times = round, times

    def on_round(self, job, round) -> None:
        if round == self.round:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


EVENTS = [
    *[
        ("started", 4, 0),
        ("prepared", True),
        ("row", 0),
        ("round", 0),
        ("round", 1),
        ("row", 2),
        ("round", 2),
    ],
    *[("round", 3), ("row", 4), ("round", 4), ("ended", "done")],
]


def test_what_training_tells() -> None:
    notes = Notes()
    result = train(notes, evaluate_every=2)
    assert notes.seen == EVENTS
    assert notes.rows == result.history.rows
    assert result.status == "done"


def test_a_run_directory_tells_the_same(tmp_path: Path) -> None:
    notes, plan = Notes(), make_plan(tmp_path)
    Runner.start(plan, tmp_path).execute([notes])
    assert notes.seen == EVENTS * len(plan.jobs)


def test_a_callback_stops_training() -> None:
    notes = Notes()
    result = train(notes, StopAt(2), rounds=9)
    assert result.status == "stopped"
    assert not result.diverged
    assert result.history["round"] == [0, 1, 2]
    assert torch.equal(result.models, train(rounds=2).models)
    assert notes.seen[-1] == ("ended", "stopped")


def test_the_models_of_a_stopped_job_are_measured() -> None:
    result = train(StopAt(2), rounds=9, evaluate_every=5)
    assert result.history["round"] == [0, 2]
    assert result.history["train_loss"][-1] == train(rounds=2).history["train_loss"][-1]
    assert repr(result).startswith("TrainResult(stopped after round 2: ")


def test_a_stop_in_the_last_round_changes_nothing() -> None:
    assert train(StopAt(4)).status == "done"


def test_a_callback_stops_a_minimisation() -> None:
    result = hf.minimize([lambda x: (x**2).sum()], [1.0], hf.FedAvg(lr=0.1), 9, callbacks=[StopAt(3)])
    assert (result.status, len(result.x)) == ("stopped", 4)


def test_a_callback_stops_a_job_of_a_run(tmp_path: Path) -> None:
    runner = Runner.start(make_plan(tmp_path, "algorithm.gossip.lr=0.05"), tmp_path)
    runner.execute([StopAt(2)])
    record = load_record(runner.folder)
    assert [(job["status"], job["round"]) for job in record.summary["jobs"]] == [("stopped", 2)] * 2
    assert record.summary["jobs"][0]["message"] == "round 2 is enough"
    assert [(row.status, row.note) for row in record.final_table()] == [("stopped", "stopped at round 2")] * 2
    assert len(list((runner.folder / "models").iterdir())) == 2
    # It ended as was wanted, so there is nothing to resume.
    outcome = holdfast("resume", runner.folder)
    assert outcome.code == 0
    assert "of 2 jobs, 2 stopped early" in " ".join(outcome.out.split())
    assert json.loads((runner.folder / "summary.json").read_text())["jobs"] == record.summary["jobs"]


def test_early_stopping() -> None:
    functions = [lambda x: (x**2).sum()]
    stopping = hf.EarlyStopping("train_loss", patience=2)
    result = hf.minimize(functions, [1.0], hf.FedAvg(lr=0.5), 100, callbacks=[stopping])
    assert result.status == "stopped"
    assert result.history["round"] == [0, 1, 2, 3]  # lr = 1/L: the optimum after one round
    again = hf.minimize(functions, [1.0], hf.FedAvg(lr=0.5), 100, callbacks=[stopping])
    assert again.history["round"] == [0, 1, 2, 3]  # it begins anew with each job


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([1.0, 0.9, 0.9, 0.9, 0.8], {"metric": "train_loss", "patience": 2}, 3),
        ([1.0, 0.9, 0.9, 0.8, 0.8], {"metric": "train_loss", "patience": 2}, None),
        ([1.0, 0.95, 0.91, 0.8], {"metric": "train_loss", "patience": 2, "min_delta": 0.1}, 2),
        ([0.1, 0.2, 0.2, 0.2], {"metric": "test_accuracy", "patience": 2}, 3),
        ([0.1, 0.2, 0.3, 0.4], {"metric": "test_accuracy", "patience": 1}, None),
        ([3.0, 2.0, 1.0], {"metric": "my_score", "patience": 2, "mode": "max"}, 2),
        ([1.0, float("nan"), float("nan")], {"metric": "train_loss", "patience": 2}, 2),
    ],
)
def test_when_it_stops(values: list[float], options: dict[str, Any], stops: int | None) -> None:
    stopping, stopped = hf.EarlyStopping(**options), None
    for measurement, value in enumerate(values):
        try:
            stopping.on_evaluate(None, {"round": measurement, options["metric"]: value})  # type: ignore[arg-type]
        except hf.Stop:
            stopped = measurement
            break
    assert stopped == stops


def test_what_early_stopping_refuses() -> None:
    with pytest.raises(hf.HoldfastError, match="metric 'my_score': say mode='max' if it should rise"):
        hf.EarlyStopping("my_score")
    with pytest.raises(hf.HoldfastError, match="patience: should be greater than or equal to 1"):
        hf.EarlyStopping("train_loss", 0)
    with pytest.raises(hf.HoldfastError, match="no metric 'test_accuracy' is recorded; there are round"):
        train(hf.EarlyStopping("test_accuracy"))


# --- errors ------------------------------------------------------------------------------------------------


class Broken(hf.Callback):
    def __init__(self, event: str) -> None:
        setattr(self, event, self.fail)

    def fail(self, *told: object) -> None:
        raise hf.HoldfastError("no more disk space")


EACH = ["on_train_begin", "on_prepared", "on_evaluate", "on_round", "on_train_end"]


@pytest.mark.parametrize("event", EACH)
def test_an_error_of_a_callback_reaches_the_caller(event: str, tmp_path: Path) -> None:
    with pytest.raises(hf.HoldfastError, match="no more disk space"):
        train(Broken(event))
    with pytest.raises(hf.HoldfastError, match="no more disk space"):
        Runner.start(make_plan(tmp_path), tmp_path).execute([Broken(event)])


def test_all_are_told_of_a_failure() -> None:
    notes = Notes()
    with pytest.raises(hf.HoldfastError):
        train(notes, Broken("on_evaluate"))
    assert notes.seen[-1] == ("ended", "failed")


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(
        hf.HoldfastError, match=r"callbacks: expected instances of hf\.Callback, got <built-in"
    ):
        train(print)  # type: ignore[arg-type]


# --- Ctrl-C ------------------------------------------------------------------------------------------------


def test_ctrl_c_returns_what_there_is() -> None:
    before = signal.getsignal(signal.SIGINT)
    result = train(InterruptAt(3), rounds=50)
    assert result.status == "interrupted"
    assert result.history["round"] == [0, 1, 2, 3]
    assert torch.equal(result.models, train(rounds=3).models)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait() -> None:
    before, notes = signal.getsignal(signal.SIGINT), Notes()
    with pytest.raises(KeyboardInterrupt):
        train(notes, InterruptAt(1, times=2), rounds=50)
    assert notes.seen[-1] == ("ended", "interrupted")
    assert signal.getsignal(signal.SIGINT) is before


def test_training_in_a_thread() -> None:
    found: list[hf.TrainResult] = []
    thread = threading.Thread(target=lambda: found.append(train()))
    thread.start()
    thread.join()
    assert found[0].status == "done"


# --- ours --------------------------------------------------------------------------------------------------


def test_progress_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    assert capsys.readouterr() == ("", "")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    train(hf.Progress(console=console), metrics=["train_loss"])
    assert "FedAvg" in shown.getvalue()
    assert "4/4" in shown.getvalue()


def test_progress_ends_with_an_error() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = hf.Progress(console=console)
    with pytest.raises(hf.HoldfastError):
        train(progress, Broken("on_round"))
    assert not progress.live.is_started
    train(progress)  # and can be used again


def test_tensorboard_of_training(tmp_path: Path) -> None:
    train(hf.TensorBoard(tmp_path / "logs"))
    [folder] = (tmp_path / "logs").iterdir()
    assert folder.name == "FedAvg-seed0"
    assert list(folder.iterdir())
