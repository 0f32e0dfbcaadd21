"""MLflow and Weights & Biases, the real libraries writing locally; skipped where they are not installed."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf

X, Y = torch.linspace(0, 1, 24).reshape(12, 2), torch.arange(12) % 3
METHOD = hf.FedAvg(lr=0.1, local_steps=2)


def train(*callbacks: hf.Callback, method: Any = METHOD, **options: Any) -> hf.TrainResult:
    torch.manual_seed(0)
    data = [(X[:6], Y[:6]), (X[6:], Y[6:])]
    given = {"rounds": 4, **options}
    return hf.train(method, model=nn.Linear(2, 3), data=data, callbacks=callbacks, **given)


class InterruptAt(hf.Callback):
    def __init__(self, round: int) -> None:
        self.round = round

    def on_round(self, job, round) -> None:
        if round == self.round:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("name", "extra"), [("MLflow", "mlflow"), ("WandB", "wandb")])
def test_what_is_not_installed_says_so(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(hf.HoldfastError, match=rf"is not installed: pip install 'holdfast\[{extra}\]'"):
        getattr(hf, name)()


# --- MLflow ------------------------------------------------------------------------------------------------


def mlflow_runs(uri: str) -> list[Any]:
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("digits")
    return client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])


def mlflow_curve(uri: str, run: Any, metric: str) -> list[tuple[int, float]]:
    mlflow = pytest.importorskip("mlflow")
    history = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, metric)
    return sorted((point.step, point.value) for point in history)


def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    logger = hf.MLflow("digits", tracking_uri=uri, tags={"team": "ours"})
    result = train(logger)
    with pytest.warns(RuntimeWarning, match="diverged"):
        train(logger, method=hf.FedAvg(lr=1e300, local_steps=2))
    first, second = mlflow_runs(uri)
    rows = result.history.rows
    assert mlflow_curve(uri, first, "train_loss") == [(row["round"], row["train_loss"]) for row in rows]
    expected = {"algorithm": "FedAvg", "lr": "0.1", "local_steps": "2", "rounds": "4", "nodes": "2"}
    assert expected.items() <= first.data.params.items()
    assert (first.info.run_name, first.info.status) == ("FedAvg", "FINISHED")
    assert first.data.tags["team"] == "ours"
    assert (second.info.status, second.data.tags["holdfast.status"]) == ("FAILED", "diverged")


def test_mlflow_of_a_resumed_job_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    logger = hf.MLflow("digits", tracking_uri=uri)
    train(logger, InterruptAt(2), run_dir=tmp_path / "run")
    result = train(logger, run_dir=tmp_path / "run", resume=True)
    first, second = mlflow_runs(uri)
    assert first.info.status == "KILLED"
    assert [value for _, value in mlflow_curve(uri, second, "train_loss")] == result.history["train_loss"]


# --- Weights & Biases --------------------------------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: LevelDB's log format in blocks of 32 KiB, after a header of 7 bytes."""
    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too little for a header: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def wandb_history(folder: Path) -> tuple[dict[str, Any], list[dict[str, float]], dict[str, Any]]:
    """Configuration, rows and summary of the only offline run under ``folder``."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    config: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    summary: dict[str, Any] = {}

    def values(items: Any) -> dict[str, Any]:
        return {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items}

    records = [pb.Record.FromString(data) for data in wandb_records(file)]
    deadline = time.monotonic() + 60
    while not any(record.HasField("exit") for record in records):  # written a moment after finish returns
        assert time.monotonic() < deadline
        time.sleep(0.05)
        records = [pb.Record.FromString(data) for data in wandb_records(file)]
    for record in records:
        config |= values(record.run.config.update)
        summary |= values(record.summary.update)
        if row := values(record.history.item):
            rows.append(row)
    return config, rows, summary


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    result = train(hf.WandB("digits", mode="offline", folder=tmp_path))
    config, rows, summary = wandb_history(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    found = [row["train_loss"] for row in rows]
    assert all(math.isclose(a, b) for a, b in zip(found, result.history["train_loss"], strict=True))
    assert (config["algorithm"], config["lr"], config["nodes"]) == ("FedAvg", 0.1, 2)
    assert summary["status"] == "done"


def test_wandb_of_a_resumed_job_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    train(InterruptAt(2), run_dir=tmp_path / "run")
    train(hf.WandB(mode="offline", folder=tmp_path), run_dir=tmp_path / "run", resume=True)
    _, rows, _ = wandb_history(tmp_path)
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
