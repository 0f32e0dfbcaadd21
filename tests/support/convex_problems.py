"""Convex objectives for tests of the reference optimum and of curvature."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from holdfast.data import DATASETS
from holdfast.data.federated import FederatedData
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy, SquaredError
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem


def digits(loss=None, module=None, dtype=torch.float64, x=None, counts=(400, 300, 200), **options):
    """Digits on three nodes of different sizes; 650 parameters."""
    data = DATASETS.build("digits", {})
    total = sum(counts)
    samples = data.x_train[:total].flatten(1) if x is None else x
    return ModelProblem(
        FlatModel(module or nn.Linear(64, 10), torch.device("cpu"), dtype),
        loss or CrossEntropy(),
        FederatedData(samples, data.y_train[:total], np.array(counts)),
        batch_size=None,
        seed=0,
        **({"regulariser": Regulariser(l2=0.01), "mean": data.mean, "std": data.std} | options),
    )


def regression(dim: int = 3, l2: float = 0.0) -> ModelProblem:
    """Least squares without bias on four nodes, whose optimum is a linear system."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, dim)), rng.standard_normal(40)
    data = FederatedData(torch.tensor(x), torch.tensor(y), np.array([5, 10, 10, 15]))
    model = FlatModel(nn.Linear(dim, 1, bias=False), torch.device("cpu"), torch.float64)
    return ModelProblem(model, SquaredError(), data, batch_size=None, seed=0, regulariser=Regulariser(l2=l2))
