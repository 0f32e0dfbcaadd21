"""Quadratics on which DualFL's theorems are tried: their optima, curvatures and local solutions are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holdfast.contract import Method
<<<<<<< HEAD
=======
from holdfast.core.randomness import Word
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.problem import ExactProblem
>>>>>>> dp
from holdfast.solvers import LocalProblem, Solver
from holdfast.topology import server
from holdfast_papers.quadratics import Quadratics, path

NODES, DIM = 10, 8
HETEROGENEITY = 0.3  # by how much the curvatures of a node differ from the others'


<<<<<<< HEAD
=======
class Quadratics(ExactProblem):
    """f_i(x) = (1/2) (x - b_i)^T A_i (x - b_i) + l1 ||x||_1, all nodes in one product."""

    def __init__(self, A: Tensor, b: Tensor, l1: float = 0.0) -> None:
        self.A = A  # [n, d, d]
        self.b = b  # [n, d]
        self.l1 = l1
        self.nodes, self.dim = b.shape
        self.x0 = torch.zeros(self.dim, dtype=torch.float64)

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        return self.hessian_products(x, x - self.b[nodes], nodes) + self.l1 * x.sign()

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        away = x - self.b[nodes]
        return 0.5 * (away * self.hessian_products(x, away, nodes)).sum(-1) + self.l1 * x.abs().sum(-1)

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        return self.A[nodes]

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return (self.A[nodes] @ v[..., None]).squeeze(-1)

    def global_value(self, x: Tensor) -> Tensor:
        return self.values(x.expand(self.nodes, -1), torch.arange(self.nodes)).mean()

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.global_value(x), self.common_gradient(x)

    def common_gradient(self, x: Tensor) -> Tensor:
        """The gradient of the mean of all f_i at ``x`` [d]."""
        return self.full_grads(x.expand(self.nodes, -1), torch.arange(self.nodes)).mean(0)

    @property
    def optimum(self) -> Tensor:
        """The minimiser of the mean of all f_i, [d]; without an l1 term."""
        return self.regularised_optimum(0.0)

    def regularised_optimum(self, alpha: float) -> Tensor:
        """The minimiser of the mean of all f_i + (alpha/2)||x||^2, [d]; without an l1 term."""
        A = self.A.mean(0) + alpha * torch.eye(self.dim, dtype=torch.float64)
        solution: Tensor = torch.linalg.solve(A, (self.A @ self.b[..., None]).mean(0))
        return solution.squeeze(-1)

    def path(self, method: Method, rounds: int) -> Tensor:
        """[rounds + 1, d]: the common model after every round."""
        simulation = Simulation(method, self, server(self.nodes))
        models = [simulation.models.mean(0)]
        for _ in range(rounds):
            simulation.step()
            models.append(simulation.models.mean(0))
        return torch.stack(models)


>>>>>>> dp
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
