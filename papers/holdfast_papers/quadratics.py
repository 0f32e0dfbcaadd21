"""Quadratics whose optima are known, and the simulations on them that theory is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from holdfast.contract import Method
from holdfast.core.randomness import Word
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.problem import ExactProblem, Problem
from holdfast.topology import Network


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


def visited(method: Method, problem: Problem, network: Network, rounds: int) -> Iterator[Simulation]:
    """The simulation at the start and after each round."""
    simulation = Simulation(method, problem, network)
    yield simulation
    for _ in range(rounds):
        simulation.step()
        yield simulation


def path(method: Method, problem: Problem, network: Network, rounds: int) -> Tensor:
    """[rounds + 1, n, d]: every node's model."""
    return torch.stack([at.models.clone() for at in visited(method, problem, network, rounds)])
