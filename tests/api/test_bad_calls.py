"""Mistakes in Python: an error of one line that names the argument, what was given and what is allowed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.core.validation import check

X = torch.linspace(0, 1, 24).reshape(12, 2)
Y = torch.arange(12) % 3
GOOD = {
    "algorithm": hf.FedAvg(lr=0.1),
    "model": nn.Linear(2, 3),
    "data": [(X[:6], Y[:6]), (X[6:], Y[6:])],
    "rounds": 1,
}
CALLS = {
    "algorithm by name": ({"algorithm": "fedavg"}, r"algorithm 'fedavg': the value 'lr' is missing"),
    "no algorithm": ({"algorithm": "fedav"}, r"unknown algorithm 'fedav': did you mean 'fedavg'"),
    "nameless algorithm": ({"algorithm": {"lr": 0.1}}, r"algorithm: expected a name among the keys, .* got"),
    "loss object": ({"loss": 3}, r"loss: expected a name such as 'cross-entropy', or a function .*, got 3"),
    "channel object": ({"channel": 3}, r"channel: should be an instance of Channel, got 3"),
    "model name": ({"model": "ml"}, r"unknown model 'ml'"),
    "algorithm class": ({"algorithm": hf.FedAvg}, r"algorithm: expected one such as"),
    "model": ({"model": 3}, r"model: should be an instance of Module, got 3"),
    "rounds": ({"rounds": 0}, r"rounds: should be greater than or equal to 1, got 0"),
    "batch size": ({"batch_size": torch.zeros(99)}, r"batch_size: should be .*, got tensor\(\[.*\.\.\.$"),
    "loss": ({"loss": "hing"}, r"unknown loss 'hing': did you mean 'hinge'"),
    "seed": ({"seed": -1}, r"seed: should be greater than or equal to 0"),
    "weights": ({"weights": "equal"}, r"weights: should be 'uniform' or 'samples', got 'equal'"),
    "cohort": ({"cohort": 3}, r"cohort: should be between 1 and the number of nodes 2, got 3"),
    "metric": ({"metrics": ["accuracy"]}, r"unknown metric 'accuracy'"),
    "metrics": ({"metrics": "train_loss"}, r"metrics: should be a valid list or 'default', got 'train_loss'"),
    "dtype": (
        {"dtype": torch.float16},
        r"dtype: should be torch.float32 or torch.float64, got torch.float16",
    ),
    "device": ({"device": "tpu"}, r"device: should be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
    "no node": ({"data": []}, r"data: there is no node"),
    "no list": ({"data": 3}, r"data: expected a list with one \(x, y\) pair.* per node, got int"),
    "empty node": ({"data": [(X, Y), (X[:0], Y[:0])]}, r"node 1 has no samples"),
    "NaN": ({"data": [(X * torch.nan, Y)]}, r"node 0, x: sample 0 has a value that is not finite"),
    "labels": ({"data": [(X, Y + 1)]}, r"labels should be class numbers from 0 to 2, got \[3\]"),
    "features": ({"data": [(X[:, :1], Y)]}, r"the model \(Linear\) fails on a batch of shape \(2, 1\)"),
    "topology": ({"topology": 3}, r"a topology must be an undirected networkx.Graph, got int"),
    "topology name": ({"topology": "rin"}, r"unknown topology 'rin': did you mean 'ring'"),
    "topology key": ({"topology": {"name": "ring", "rows": 2}}, r"unknown key in topology 'ring' 'rows'"),
    "nameless topology": ({"topology": {"rows": 2}}, r"topology: expected a name among the keys, .* got"),
    "graph size": (
        {"topology": hf.ring(3)},
        r"network: it has 3 nodes, but the problem has 2; give both the same number",
    ),
    "server": ({"topology": hf.ring(2)}, r"FedAvg needs a server"),
    "test lengths": ({"test": (X, Y[:5])}, r"lengths differ: test, x has 12, test, y has 5"),
    "test type": (
        {"test": (X, Y.float())},
        r"test y: samples are torch.float32 .* training torch.int64",
    ),
    "test shape": (
        {"test": (X[:, :1], Y)},
        r"test x: samples are .* \[1\], for training .* \[2\]",
    ),
    "test labels": ({"test": (X, Y + 1)}, r"labels should be class numbers from 0 to 2, got \[3\]"),
    "SyncBatchNorm": (
        {"model": nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))},
        r"layer '1' \(SyncBatchNorm\) cannot be trained here: .* use torch.nn.GroupNorm",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CALLS.values(), ids=CALLS)
def test_train_refuses(changes: dict, message: str) -> None:
    arguments = GOOD | changes
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        hf.train(arguments.pop("algorithm"), **arguments)
    assert "\n" not in str(caught.value)


def test_train_takes_what_the_others_were_made_from() -> None:
    arguments = dict(GOOD)
    assert not hf.train(arguments.pop("algorithm"), **arguments).diverged


def test_train_refuses_what_does_not_fit_into_memory() -> None:
    nodes = 1_000_000
    data = hf.FederatedData(torch.zeros(nodes, 1), torch.zeros(nodes, dtype=torch.int64), np.ones(nodes))
    model = nn.Sequential(nn.Linear(1, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 2))
    with pytest.raises(hf.HoldfastError, match=r"SCAFFOLD on 1000000 nodes needs about .* GiB of memory"):
        hf.train(hf.SCAFFOLD(lr=0.1), model=model, data=data, rounds=1)


@pytest.mark.parametrize(
    ("functions", "x0", "message"),
    [
        ([], [0.0], "functions: expected one differentiable function per node, got none"),
        ([3], [0.0], "functions: should be callable, got 3"),
        ([torch.sin], [0.0, 1.0], r"function 0: expected a scalar \(0-dim\) tensor at x0, got \[2\]"),
        ([torch.sum], [[0.0]], r"x0: expected a 1-D tensor, got shape \[1, 1\]"),
        ([torch.sum], [float("nan")], r"x0: expected finite numbers, got \[nan\]"),
    ],
)
def test_minimize_refuses(functions: list, x0: list, message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        hf.minimize(functions, x0, hf.FedAvg(lr=0.1), rounds=1)


def test_a_matrix_that_is_not_doubly_stochastic() -> None:
    W = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]])
    with pytest.raises(hf.HoldfastError, match=r"it must be symmetric \(and so doubly stochastic\)"):
        hf.Network.of(hf.line(3), W)
    with pytest.raises(hf.HoldfastError, match="every row must sum to 1"):
        hf.Network.of(hf.line(3), 2 * W)


def test_long_values_are_quoted_in_short() -> None:
    with pytest.raises(hf.HoldfastError) as caught:
        check("size", int, "a" * 1000 + "\n")
    assert str(caught.value) == f"size: should be a valid integer, got '{'a' * 76}..."
