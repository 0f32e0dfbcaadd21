"""Quadratics and exact local solvers for DualFL and its rivals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from conftest import Quadratics
from torch import Tensor

from holdfast.solvers import Solver


@dataclass(frozen=True)
class SoftThreshold(Solver):
    """Exact for a quadratic with a diagonal Hessian plus l1 ||u||_1, which the objective leaves out."""

    l1: float

    def solve(self, problem, start) -> Tensor:
        zero = torch.zeros_like(start)
        curvature = problem.hessian(zero).diagonal(dim1=-2, dim2=-1)
        return soft_threshold(-problem.grad(zero), self.l1) / curvature


def soft_threshold(x: Tensor, by: float) -> Tensor:
    return x.sign() * (x.abs() - by).clamp(min=0)


def shared_basis(curvatures: np.ndarray, seed: int = 0) -> Quadratics:
    """A_i = Q diag(curvatures_i) Q^T [n, d]: the mean is as ill-conditioned as its parts.

    With independent bases it would not be, and gradient descent would need no acceleration.
    """
    rng = np.random.default_rng(seed)
    nodes, dim = curvatures.shape
    basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
    matrices = np.einsum("ij,nj,kj->nik", basis, curvatures, basis)
    return Quadratics(torch.tensor(matrices), torch.tensor(3 * rng.standard_normal((nodes, dim))))


def ill_conditioned(kappa: float, nodes: int = 10, dim: int = 8) -> Quadratics:
    """mu = 1/kappa and L = 1; a node's curvatures differ by up to 30 % from the others'."""
    rng = np.random.default_rng(7)
    curvatures = np.geomspace(1 / kappa, 1, dim) * (1 + 0.3 * rng.uniform(-1, 1, (nodes, dim)))
    return shared_basis(curvatures.clip(1 / kappa, 1))


def merely_convex(nodes: int = 10, dim: int = 8) -> Quadratics:
    """L = 1, and every node is flat in some direction, in which others are not."""
    rng = np.random.default_rng(7)
    curvatures = np.geomspace(1e-4, 1, dim) * (1 + 0.3 * rng.uniform(-1, 1, (nodes, dim)))
    curvatures[np.arange(nodes), np.arange(nodes) % (dim - 1)] = 0
    curvatures[:, -1] = 1
    return shared_basis(curvatures.clip(0, 1))


def rounds_to(tolerance: float, path: Tensor, point: Tensor) -> int:
    """The first round from which on every node's model stays within ``tolerance`` of ``point``."""
    far = ((path - point).norm(dim=-1).amax(-1) > tolerance).nonzero()
    assert len(far) < len(path), "never got there"
    return int(far[-1]) + 1


def power(x: list[float], y: list[int]) -> float:
    """p of the fit y = c x^p."""
    slope, _ = np.polyfit(np.log(x), np.log(y), 1)
    return float(slope)
