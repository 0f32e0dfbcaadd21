"""Convexity and curvature of objectives, on which step sizes and rates of convex methods depend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree
from holdfast.core.world import ALONE, World
from holdfast.problem.losses import Loss
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.problem import Bounds, Convexity, Problem
from holdfast.problem.row_loss import RowLoss

# --- what is known about the convexity of an objective from its parts, without looking at Hessians ------


def convexity_of(
    loss: RowLoss, regulariser: Regulariser, samples: Tree, gram: Callable[[], Problem]
) -> Convexity:
    """The convexity of a model's loss, found by trying it on ``samples`` in float64."""
    cost, curvature, mu = loss.loss, loss.loss.curvature, regulariser.least
    attained = mu > 0 or cost.quadratic
    if not regulariser.convex:
        return Convexity("the regulariser is not convex", mu, attained)
    if curvature is None:
        return Convexity(f"nothing is known about the loss {type(cost).__name__}", mu, attained)
    if not _is_affine(loss, samples):
        return Convexity("the model is not linear in its parameters", mu, attained)
    return Convexity(None, mu, attained, Bounds(regulariser.most, curvature, gram, cost.quadratic))


def _is_affine(loss: RowLoss, samples: Tree) -> bool:
    """Whether model(x + y) + model(0) = model(x) + model(y) at two random points."""
    generator, x0 = torch.Generator().manual_seed(0), loss.model.x0
    x, y = torch.randn(2, len(x0), dtype=torch.float64, generator=generator).to(x0)
    with torch.no_grad():
        outputs = [loss.outputs(at, samples) for at in (x + y, torch.zeros_like(x), x, y)]
    together, zero, first, second = outputs
    scale = first.abs().max() + second.abs().max()
    return bool((together + zero - first - second).abs().max() <= 1e-10 * scale)


class SquaredOutputs(Loss):
    """||outputs||^2 / 2, whose Hessian in the parameters of an affine model is the Gram matrix."""

    has_accuracy = False

    def outputs(self, classes: int | None) -> int:
        raise NotImplementedError

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        raise NotImplementedError

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(len(targets), -1).square().sum(-1) / 2


# --- convexity and curvature of objectives --------------------------------------------------------------


DENSE_DIMENSION = 500  # up to here Hessians are formed, and their eigenvalues are exact
PRECISION = 1e-6  # relative, of eigenvalues found by Hessian-vector products


class Curvature(NamedTuple):
    """Every f_i is ``mu``-strongly convex and, but for an l1 term, ``L``-smooth."""

    mu: float
    L: float
    everywhere: bool  # bounds that hold at all points, or eigenvalues at the initial model

    @property
    def kappa(self) -> float:
        """The condition number L/mu."""
        return self.L / self.mu if self.mu else math.inf


def estimate_curvature(problem: Problem, world: World = ALONE) -> Curvature:
    """The least mu and the largest L over the nodes, here and elsewhere in ``world``, in float64.

    Where a convex loss meets a model that is linear in its parameters, both are bounds for all points: mu is
    the regulariser's (for few parameters and squared errors, also that of the data), L the regulariser's plus
    the loss's bound on second derivatives times the largest eigenvalue of the nodes' Gram matrices. Otherwise
    L, and mu of given functions, are eigenvalues of the Hessians at the initial model: exact for quadratics,
    and only a hint for others.
    """
    if not problem.smooth:
        raise HoldfastError(
            "L: the exact hinge has kinks, so there is none; give the loss some smoothing, or use rho = 0"
        )
    convexity = problem.convexity
    if convexity.mu is None:
        if problem.dim > DENSE_DIMENSION:
            limit = f"it is estimated for up to {DENSE_DIMENSION} parameters"
            raise HoldfastError(f"mu: {limit}, there are {problem.dim}: give it")
        return Curvature(*_extreme_eigenvalues(problem, world), everywhere=False)
    if convexity.bounds is None:
        return Curvature(convexity.mu, _extreme_eigenvalues(problem.in_float64, world)[1], everywhere=False)
    most, curvature, gram, reached = convexity.bounds
    lowest, highest = _extreme_eigenvalues(gram(), world)
    mu = convexity.mu + (curvature * lowest if reached else 0.0)
    return Curvature(mu, most + curvature * highest, everywhere=True)


def why_not_convex(problem: Problem) -> str | None:
    """What keeps an objective from being convex, or None; given functions are taken to be convex."""
    return problem.convexity.obstacle


def _extreme_eigenvalues(problem: Problem, world: World) -> tuple[float, float]:
    """The smallest (0 if there are many parameters) and the largest of the nodes' Hessians at x0."""
    x, each = problem.x0.unsqueeze(0), torch.split(problem.here, 1)
    if problem.dim <= DENSE_DIMENSION:
        values = torch.cat([torch.linalg.eigvalsh(problem.hessians(x, node)) for node in each])
        least, most = float(values.min()), float(values.max())
    else:
        least, most = 0.0, max(_largest_eigenvalue(problem, node) for node in each)
    least, negative = world.lowest(torch.tensor([least, -most], dtype=torch.float64)).tolist()
    return least, -negative


def _largest_eigenvalue(problem: Problem, node: Tensor) -> float:
    """By Lanczos' method, from Hessian-vector products alone."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    x = problem.x0.unsqueeze(0)

    def product(v: np.ndarray) -> np.ndarray:
        direction = torch.as_tensor(v.reshape(1, -1)).to(x)
        return problem.hessian_products(x, direction, node).reshape(-1).cpu().numpy()

    operator = LinearOperator((problem.dim, problem.dim), matvec=product, dtype=np.float64)
    first = np.random.default_rng(0).standard_normal(problem.dim)
    return float(eigsh(operator, k=1, which="LA", v0=first, tol=PRECISION, return_eigenvectors=False)[0])
