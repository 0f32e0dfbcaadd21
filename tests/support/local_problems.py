"""Local problems for tests of solvers, and objectives that remember what they are asked."""

from __future__ import annotations

import math

import numpy as np
import torch
from conftest import Quadratics
from torch import Tensor

from holdfast.core.randomness import Word
from holdfast.data import DATASETS, IID, partition
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem

EXACTLY = {"stop": "gradient", "tolerance": 1e-10}


class Recorded:
    """An objective that remembers what it is asked: ("grad" or "value", points, nodes, answers)."""

    def __init__(self, problem) -> None:
        self.problem = problem
        self.calls: list[tuple[str, Tensor, Tensor, Tensor]] = []

    def __getattr__(self, name: str):
        return getattr(self.problem, name)

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        self.calls.append(("grad", x, nodes, self.problem.full_grads(x, nodes)))
        return self.calls[-1][-1]

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        self.calls.append(("value", x, nodes, self.problem.values(x, nodes)))
        return self.calls[-1][-1]

    def count(self, kind: str) -> list[int]:
        """How often each node was asked."""
        asked = torch.cat([nodes for what, _, nodes, _ in self.calls if what == kind])
        return torch.bincount(asked, minlength=self.nodes).tolist()


def oracle_of(problem, nodes: list[int] | None = None) -> BatchOracle:
    chosen = torch.arange(problem.nodes) if nodes is None else torch.tensor(nodes)
    return BatchOracle(problem, chosen, seed=0, round=0, work=Work())


def ill_conditioned(*kappas: float) -> Quadratics:
    """u^T A u / 2, a node for each kappa: 20 eigenvalues from 1/kappa to 1, evenly spaced in logarithm."""
    spectra = [torch.logspace(-math.log10(kappa), 0, 20, dtype=torch.float64) for kappa in kappas]
    return Quadratics(
        torch.stack([s.diag() for s in spectra]), torch.zeros(len(kappas), 20, dtype=torch.float64)
    )


LINEAR = -torch.tensor(np.random.default_rng(0).standard_normal(20))


def solve(problem, solver, linear=0.0, weight=0.0, start=0.0, nodes=None, gradient_norm=None):
    """The answers [m, d] and the oracle, with the work done."""
    oracle = oracle_of(problem, nodes)
    rows = torch.zeros(len(oracle.nodes), problem.dim, dtype=problem.x0.dtype)
    answer = oracle.argmin(
        rows + linear, rows, weight, rows + start, solver=solver, gradient_norm=gradient_norm
    )
    return answer, oracle.work


def logistic(loss=None, dtype=torch.float64, batch_size=None, **regulariser) -> ModelProblem:
    """Digits at half their resolution on four nodes: 170 parameters."""
    digits = DATASETS.build("digits", {})
    data = partition(digits.x_train[:400, ..., ::2, ::2], digits.y_train[:400], IID(), nodes=4, seed=0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10))
    return ModelProblem(
        FlatModel(model, torch.device("cpu"), dtype),
        loss or CrossEntropy(),
        data,
        batch_size=batch_size,
        seed=0,
        regulariser=Regulariser(**({"l2": 0.1} | regulariser)),
        mean=digits.mean,
        std=digits.std,
    )
