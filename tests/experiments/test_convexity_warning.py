"""Methods for convex problems say so when the problem is not convex, and run all the same."""

from __future__ import annotations

import warnings

import pytest
import torch

import holdfast as hf


def train(model: torch.nn.Module, algorithm) -> hf.TrainResult:
    x = torch.linspace(-1, 1, 40).reshape(20, 2)
    y = (x[:, 0] > 0).long()
    data = hf.partition(x, y, hf.IID(), nodes=2, seed=0)
    return hf.train(algorithm, model=model, data=data, rounds=1, batch_size=4)


def test_a_nonconvex_model_is_mentioned_and_trained():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    with pytest.warns(RuntimeWarning, match="Scaffnew promises to converge on convex objectives only"):
        result = train(net, hf.Scaffnew(lr=0.1, p=1.0))
    assert len(result.history) == 2


@pytest.mark.parametrize("algorithm", [hf.Scaffnew(lr=0.1, p=1.0), hf.SCAFFOLD(lr=0.1)])
def test_a_convex_problem_is_not(algorithm):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(torch.nn.Linear(2, 2), algorithm)


def test_nor_a_method_that_promises_nothing_about_convexity():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(net, hf.SCAFFOLD(lr=0.1))
