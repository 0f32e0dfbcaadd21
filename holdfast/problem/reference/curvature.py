"""Convexity and curvature of objectives: what step sizes and rates of convex methods are made of."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.world import ALONE, World
from holdfast.data.dataset import prepare
from holdfast.problem.losses import Loss, SquaredError
from holdfast.problem.model_problem import ModelObjective
from holdfast.problem.problem import Objective, nodes_here
from holdfast.problem.regulariser import Regulariser

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


def estimate_curvature(objective: Objective, world: World = ALONE) -> Curvature:
    """The least mu and the largest L over the nodes, here and elsewhere in ``world``, in float64.

    Where a convex loss meets a model that is linear in its parameters, both are bounds for all points: mu is
    the regulariser's (for few parameters and squared errors, also that of the data), L the regulariser's plus
    the loss's bound on second derivatives times the largest eigenvalue of the nodes' Gram matrices. Otherwise
    L, and mu of given functions, are eigenvalues of the Hessians at the initial model: that tells all about
    quadratics and little about others.
    """
    if not objective.smooth:
        raise HoldfastError(
            "L: the exact hinge has kinks, so there is none; give the loss some smoothing, or use rho = 0"
        )
    if isinstance(objective, ModelObjective):
        exact, bound = objective.in_float64, objective.loss.curvature
        if bound is not None and why_not_convex(exact) is None:
            gram = exact.variant(loss=_SquaredOutputs(), regulariser=Regulariser())
            lowest, highest = _extreme_eigenvalues(gram, world, lowest=isinstance(exact.loss, SquaredError))
            l2 = exact.regulariser.l2
            return Curvature(l2 + bound * lowest, l2 + bound * highest, everywhere=True)
        highest = _extreme_eigenvalues(exact, world, lowest=False)[1]
        return Curvature(exact.regulariser.l2, highest, everywhere=False)
    return Curvature(*_extreme_eigenvalues(objective, world, lowest=True), everywhere=False)


def why_not_convex(objective: Objective) -> str | None:
    """What keeps an objective from being convex, or None; given functions are taken to be convex."""
    if not isinstance(objective, ModelObjective):
        return None
    if objective.regulariser.nonconvex:
        return "the regulariser is not convex"
    if objective.loss.curvature is None:
        return f"nothing is known about the loss {type(objective.loss).__name__}"
    return None if _is_affine(objective.in_float64) else "the model is not linear in its parameters"


def _is_affine(objective: ModelObjective) -> bool:
    """Whether model(x + y) + model(0) = model(x) + model(y) at two random points, which decides it."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, objective.dim, dtype=torch.float64, generator=generator).to(objective.x0)
    samples = prepare(objective.x[:64], objective.mean, objective.std, torch.float64)
    with torch.no_grad():
        outputs = [objective.model.evaluate(at, samples) for at in (x + y, torch.zeros_like(x), x, y)]
    together, zero, first, second = outputs
    scale = first.abs().max() + second.abs().max()
    return bool((together + zero - first - second).abs().max() <= 1e-10 * scale)


class _SquaredOutputs(Loss):
    """||outputs||^2 / 2, whose Hessian in the parameters of an affine model is the Gram matrix."""

    def outputs(self, classes: int | None) -> int:
        raise NotImplementedError

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        raise NotImplementedError

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(len(targets), -1).square().sum(-1) / 2


def _extreme_eigenvalues(objective: Objective, world: World, *, lowest: bool) -> tuple[float, float]:
    """The smallest (0 unless ``lowest``) and the largest eigenvalue of the nodes' Hessians at x0."""
    least, most = _extreme_eigenvalues_here(objective, lowest=lowest)
    least, negative = world.lowest(torch.tensor([least, -most], dtype=torch.float64)).tolist()
    return least, -negative


def _extreme_eigenvalues_here(objective: Objective, *, lowest: bool) -> tuple[float, float]:
    x, nodes = objective.x0.unsqueeze(0), nodes_here(objective)
    if objective.dim <= DENSE_DIMENSION:
        per_node = [torch.linalg.eigvalsh(objective.hessians(x, node)) for node in torch.split(nodes, 1)]
        values = torch.cat(per_node)
        return float(values.min()) if lowest else 0.0, float(values.max())
    if lowest and not isinstance(objective, ModelObjective):
        raise HoldfastError(
            f"mu: it is estimated for up to {DENSE_DIMENSION} parameters, there are {objective.dim}: give it"
        )
    return 0.0, max(_largest_eigenvalue(objective, node) for node in torch.split(nodes, 1))


def _largest_eigenvalue(objective: Objective, node: Tensor) -> float:
    """By Lanczos' method, the power iteration that remembers: Hessian-vector products alone."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    x = objective.x0.unsqueeze(0)

    def product(v: np.ndarray) -> np.ndarray:
        direction = torch.as_tensor(v.reshape(1, -1)).to(x)
        return objective.hessian_products(x, direction, node).reshape(-1).cpu().numpy()

    operator = LinearOperator((objective.dim, objective.dim), matvec=product, dtype=np.float64)
    first = np.random.default_rng(0).standard_normal(objective.dim)
    return float(eigsh(operator, k=1, which="LA", v0=first, tol=PRECISION, return_eigenvectors=False)[0])
