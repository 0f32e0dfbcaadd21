"""``hf.compare``: the same figures as training one by one, resumable, with the command line's own report."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import make_plan, rows, run_plan
from torch import nn

import holdfast as hf
from holdfast.data import DATASETS
from holdfast.experiments.record import load_record
from holdfast.models import mlp
from holdfast.report.html import report_html

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
METHODS = {"ours": hf.LocalGECL(lr=0.2, local_steps=2), "plain gossip": hf.Gossip(lr=0.2, local_steps=2)}


def split(seed: int) -> hf.FederatedData:
    return hf.partition(X, Y, hf.Dirichlet(1.0), nodes=4, seed=seed)


def compare(methods: Any = METHODS, **options: Any) -> hf.Comparison:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "data": split,
        "topology": "ring",
        "rounds": 4,
        "batch_size": 4,
        "seeds": range(2),
        "test": (X, Y),
        "metrics": ["test_accuracy", "train_loss"],
        **options,
    }
    return hf.compare(methods, **given)


@pytest.fixture(scope="module")
def comparison() -> hf.Comparison:
    return compare()


def test_each_job_is_what_train_gives(comparison: hf.Comparison) -> None:
    frame = comparison.to_pandas()
    for name, method in METHODS.items():
        for seed in range(2):
            torch.manual_seed(seed)
            alone = hf.train(
                method,
                model=nn.Linear(4, 2),
                data=split(seed),
                topology="ring",
                rounds=4,
                batch_size=4,
                test=(X, Y),
                seed=seed,
            )
            mine = frame[(frame["algorithm"] == name) & (frame["seed"] == seed)]
            assert list(mine["train_loss"]) == alone.history["train_loss"]
            assert list(mine["payload_bytes"]) == alone.history["payload_bytes"]
            assert torch.equal(comparison.model(name, seed)(X), alone.model(X))
    assert set(comparison.statuses.values()) == {"done"}


def test_an_experiment_file_gives_the_same(tmp_path: Path) -> None:
    """One assembly line: the same data, model and methods in a file and in Python, the same figures."""
    digits = DATASETS.build("digits", {})
    assert (digits.mean, digits.std) == (0.0, 1.0)
    found = hf.compare(
        {"local-gecl": hf.LocalGECL(lr=0.1, local_steps=2), "gossip": hf.Gossip(lr=0.1, local_steps=2)},
        model=lambda: mlp(input_shape=digits.input_shape, outputs=10, hidden=[8]),
        data=lambda seed: hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=4, seed=seed),
        topology="ring",
        rounds=4,
        batch_size=8,
        evaluate_every=2,
        test=(digits.x_test, digits.y_test),
        metrics=["test_accuracy", "train_loss", "consensus"],
        seeds=[0, 1],
        run_dir=tmp_path / "python",
    )
    changes = ("seeds=[0,1]", 'metrics=["test_accuracy","train_loss","consensus"]')
    assert rows(found.path) == rows(run_plan(make_plan(tmp_path, *changes), tmp_path))


def test_the_table(comparison: hf.Comparison) -> None:
    assert repr(comparison) == comparison.table()
    lines = comparison.table().splitlines()
    assert any(re.match(r"ours +4 ", line) for line in lines)
    assert any(re.match(r"plain gossip +4 ", line) for line in lines)
    assert "Means over 2 seeds" in comparison.table()


def test_the_plot_has_a_band_over_the_seeds(comparison: hf.Comparison) -> None:
    [axes] = comparison.plot("train_loss").axes
    means = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    assert set(means) == set(METHODS)
    assert len(axes.collections) == 2
    frame = comparison.to_pandas()
    last = frame[(frame["algorithm"] == "ours") & (frame["round"] == 4)]["train_loss"]
    assert means["ours"][-1] == pytest.approx(last.mean(), rel=1e-12)
    with pytest.raises(hf.HoldfastError, match="unknown metric 'accuracy'"):
        comparison.plot("accuracy")


def test_the_report_is_that_of_the_command_line(comparison: hf.Comparison, tmp_path: Path) -> None:
    written = comparison.report(tmp_path / "report.html")
    assert written.read_text() == report_html([comparison.record])
    assert "Made in Python by <code>hf.compare</code>" in written.read_text()


def test_by_name_and_from_one_module() -> None:
    """Names as in an experiment file; and a module of the user's own, which is left alone."""
    module = nn.Linear(4, 2)
    before = module.weight.detach().clone()
    named = {"ours": {"name": "local-gecl", "lr": 0.2, "local_steps": 2}}
    found = compare(named, model=module, rounds=2)
    assert not torch.equal(found.model("ours").weight, before)
    assert torch.equal(module.weight, before)
    assert compare(named, model="linear", rounds=1, seeds=[0]).statuses == {("ours", 0): "done"}


def test_models_that_are_not_there(comparison: hf.Comparison) -> None:
    with pytest.raises(hf.HoldfastError, match="unknown algorithm 'our': did you mean 'ours'"):
        comparison.model("our")
    with pytest.raises(hf.HoldfastError, match="'ours' was not run with seed 7"):
        comparison.model("ours", 7)


def test_a_temporary_folder_goes_with_the_result() -> None:
    found = compare(rounds=1, seeds=[0])
    folder = found.path
    assert folder.is_dir()
    del found
    assert not folder.exists()


def test_one_that_diverges_does_not_stop_the_others() -> None:
    with pytest.warns(RuntimeWarning, match="mad: 2 of 2 seeds diverged at round"):
        found = compare({"mad": hf.Gossip(lr=1e38, local_steps=3), **METHODS}, rounds=2)
    assert found.statuses == {
        (name, seed): "diverged" if name == "mad" else "done" for name in ("mad", *METHODS) for seed in (0, 1)
    }
    with pytest.raises(hf.HoldfastError, match="'mad' with seed 0 left no model: it is diverged"):
        found.model("mad")


class InterruptAt(hf.Callback):
    """Ctrl-C in round 2 of the third job."""

    def __init__(self) -> None:
        self.jobs = 0

    def on_train_begin(self, job, simulation) -> None:
        self.jobs += 1

    def on_round(self, job, round) -> None:
        if self.jobs == 3 and round == 2:
            signal.raise_signal(signal.SIGINT)


def test_interrupted_and_resumed(comparison: hf.Comparison, tmp_path: Path) -> None:
    part = compare(run_dir=tmp_path / "run", callbacks=[InterruptAt()])
    assert list(part.statuses.values()) == ["done", "done", "interrupted", "pending"]
    assert "interrupted at round 2" in part.table()
    with pytest.raises(hf.HoldfastError, match="holds a run; go on with it by resume=True"):
        compare(run_dir=tmp_path / "run")
    with pytest.raises(hf.HoldfastError, match="the run began with other arguments: algorithm, batch_size"):
        compare({"ours": METHODS["ours"]}, run_dir=tmp_path / "run", resume=True, batch_size=8)
    whole = compare(run_dir=tmp_path / "run", resume=True)

    def figures(found: hf.Comparison) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in found.record.rows]

    assert figures(whole) == figures(comparison)
    assert load_record(tmp_path / "run").summary["status"] == "complete"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": [hf.FedAvg(lr=0.1)]}, r"algorithms: expected names and methods, such as"),
        ({"methods": {}}, r"algorithms: expected names and methods"),
        ({"methods": {"a": 3}}, r"algorithm: expected one such as"),
        ({"model": 3}, r"model: expected a function that makes one, or a module, got 3"),
        ({"seeds": [-1]}, r"seed: should be greater than or equal to 0"),
        ({"batch_size": 0}, r"batch_size: should be"),
    ],
    ids=str,
)
def test_mistakes(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        compare(**changed)


def test_what_lies_in_a_temporary_folder_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be resumed there: no checkpoint, and no waiting for the disk."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    found = compare(rounds=3)
    assert synced == []
    assert not (found.path / "checkpoints").exists()
    assert set(found.statuses.values()) == {"done"}


def test_interrupted_without_a_folder_gives_what_there_is() -> None:
    part = compare(callbacks=[InterruptAt()])
    assert list(part.statuses.values()) == ["done", "done", "interrupted", "pending"]
    assert "interrupted at round 2" in part.table()
    assert [row["round"] for row in part.record.rows].count(4) == 2  # of the two that were done
