"""Quadratics on which DualFL's theorems are tried: their optima, curvatures and local solutions are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.contract import Method
from holdfast.solvers import LocalProblem, Solver
from holdfast.topology import server
from holdfast_papers.quadratics import Quadratics, path

NODES, DIM = 10, 8
HETEROGENEITY = 0.3  # by how much the curvatures of a node differ from the others'


@dataclass(frozen=True)
class NewtonStep(Solver):
    """One Newton step: exact on quadratics, however ill-conditioned."""

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        step: Tensor = torch.linalg.solve(problem.hessian(start), problem.grad(start))
        return start - step


def common_path(method: Method, problem: Quadratics, rounds: int) -> Tensor:
    """[rounds + 1, d]: the common model of a server and its clients, after every round."""
    return path(method, problem, server(problem.nodes), rounds).mean(1)


def ill_conditioned(kappa: float) -> Quadratics:
    """mu = 1/kappa and L = 1. All nodes share their axes, or the mean would be better conditioned."""
    return _with_curvatures(np.geomspace(1 / kappa, 1, DIM), lowest=1 / kappa)


def merely_convex() -> Quadratics:
    """L = 1, and every node is flat in some direction, in which others are not."""
    return _with_curvatures(np.geomspace(1e-4, 1, DIM), lowest=0.0, flat=True)


def with_l1(l1: float) -> tuple[Quadratics, Tensor]:
    """Diagonal quadratics with curvatures in [0.5, 5] and kinks; and the optimum, by soft thresholds."""
    rng = np.random.default_rng(0)
    diagonal = torch.tensor(rng.uniform(0.5, 5, (NODES, DIM)))
    b = torch.tensor(3 * rng.standard_normal((NODES, DIM)))
    target = (diagonal * b).mean(0)
    optimum = target.sign() * (target.abs() - l1).clamp(min=0) / diagonal.mean(0)
    return Quadratics(torch.diag_embed(diagonal), b, l1), optimum


def _with_curvatures(typical: np.ndarray, lowest: float, flat: bool = False) -> Quadratics:
    rng = np.random.default_rng(7)
    curvatures = typical * (1 + HETEROGENEITY * rng.uniform(-1, 1, (NODES, DIM)))
    curvatures = curvatures.clip(lowest, 1)
    if flat:
        curvatures[np.arange(NODES), np.arange(NODES) % (DIM - 1)] = 0
        curvatures[:, -1] = 1
    axes, _ = np.linalg.qr(rng.standard_normal((DIM, DIM)))
    matrices = np.einsum("ij,nj,kj->nik", axes, curvatures, axes)
    return Quadratics(torch.tensor(matrices), torch.tensor(3 * rng.standard_normal((NODES, DIM))))
