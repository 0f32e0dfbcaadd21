"""Calls that are odd but legal, and mistakes of which each has once been ignored or ended in a traceback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf

X = torch.linspace(0, 1, 24).reshape(12, 2)
Y = torch.arange(12) % 3
DATA = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def train(**changes: Any) -> hf.TrainResult:
    torch.manual_seed(0)
    given = {"algorithm": hf.FedAvg(lr=0.1), "model": nn.Linear(2, 3), "data": DATA, "rounds": 2}
    return hf.train(**{**given, **changes})


def compare(**changes: Any) -> hf.Comparison:
    given = {
        "algorithms": {"a": hf.FedAvg(lr=0.1)},
        "model": lambda: nn.Linear(2, 3),
        "data": DATA,
        "rounds": 1,
    }
    return hf.compare(**{**given, **changes})


def test_whole_numbers_of_numpy() -> None:
    ours = train(rounds=2, seed=3, algorithm=hf.FedAvg(lr=0.1, local_steps=2))
    numpys = train(rounds=np.int64(2), seed=np.int32(3), algorithm=hf.FedAvg(lr=0.1, local_steps=np.int64(2)))
    assert torch.equal(ours.models, numpys.models)
    with pytest.raises(hf.HoldfastError, match="seed: should be a valid integer, got True"):
        train(seed=True)


def test_a_test_set_of_one_sample() -> None:
    result = train(test=(X[:1], Y[:1]))
    assert result.history["test_accuracy"][-1] in (0.0, 1.0)


class Masked(nn.Module):
    """Never gives the last of its four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(x)
        return outputs.masked_fill(torch.tensor([False, False, False, True]), -torch.inf)


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_scores_of_minus_infinity(backend: str) -> None:
    torch.manual_seed(0)
    model = Masked()
    ours, torchs = (
        train(model=model, loss=loss, backend=backend, dtype="float64")
        for loss in ("cross-entropy", nn.functional.cross_entropy)
    )
    assert np.isfinite(ours.history["minibatch_loss"]).all()
    assert torch.allclose(ours.models, torchs.models, rtol=0, atol=1e-14)


def test_names_that_are_too_long_for_files() -> None:
    names = ["a" * 300, "a" * 301]
    result = compare(algorithms={name: hf.FedAvg(lr=0.1) for name in names})
    assert result.statuses == {(name, 0): "done" for name in names}
    assert isinstance(result.model(names[1]), nn.Linear)


def test_a_method_needs_a_name() -> None:
    with pytest.raises(hf.HoldfastError, match="algorithms: expected names and methods"):
        compare(algorithms={"": hf.FedAvg(lr=0.1)})


def test_checkpoints_every_zero_rounds() -> None:
    message = "checkpoint_every: should be greater than or equal to 1, got 0"
    with pytest.raises(hf.HoldfastError, match=message):
        compare(checkpoint_every=0)
    with pytest.raises(hf.HoldfastError, match=message):
        hf.tune(hf.FedAvg(lr=0.1), model=nn.Linear(2, 3), data=DATA, rounds=1, checkpoint_every=0)


def test_personal_models_of_a_method_without_a_step_size() -> None:
    method = hf.FedDyn(alpha=0.5, solver="exact")
    with pytest.raises(hf.HoldfastError, match="FedDyn has no step size lr"):
        train(
            algorithm=method,
            l2=0.1,
            dtype="float64",
            test=(X, Y),
            personalize=2,
            metrics=["personal_accuracy"],
        )


def test_batch_norm_on_a_node_of_one_sample() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(hf.HoldfastError, match="node 1 has a single sample, and BatchNorm needs more"):
        train(model=model, data=[(X[:6], Y[:6]), (X[:1], Y[:1])], batch_size="full")


def test_a_name_that_is_no_word() -> None:
    with pytest.raises(hf.HoldfastError, match=r"unknown optimizer \['sgd'\]"):
        hf.FedAvg(lr=0.1, optimizer={"name": ["sgd"]})


def test_an_attacker_is_named_once() -> None:
    with pytest.raises(hf.HoldfastError, match=r"LittleIsEnough.nodes: each once, got \[1, 1\]"):
        hf.LittleIsEnough([1, 1])


@pytest.mark.parametrize(
    ("options", "cohort", "least"), [({}, 1, 2), ({"copies": 3}, 2, 3), ({"copies": 4}, "all", 4)]
)
def test_tamuna_needs_enough_clients(options: dict, cohort: int | str, least: int) -> None:
    method = hf.TAMUNA(lr=0.1, p=0.5, **options)
    with pytest.raises(hf.HoldfastError, match=f"TAMUNA needs at least {least} clients in every round"):
        train(algorithm=method, cohort=cohort, data=[*DATA, (X, Y)])
