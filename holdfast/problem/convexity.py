"""What is known about the convexity of an objective from its parts, without looking at Hessians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from holdfast.problem.losses import Loss
from holdfast.problem.problem import Bounds, Convexity, Problem
from holdfast.problem.regulariser import Regulariser
from holdfast.problem.row_loss import RowLoss


def convexity_of(
    loss: RowLoss, regulariser: Regulariser, samples: Any, gram: Callable[[], Problem]
) -> Convexity:
    """Of a loss of a model, tried on ``samples``; in float64."""
    cost, curvature = loss.loss, loss.loss.curvature
    attained = regulariser.l2 > 0 or cost.quadratic
    if regulariser.nonconvex:
        return Convexity("the regulariser is not convex", regulariser.l2, attained)
    if curvature is None:
        return Convexity(f"nothing is known about the loss {type(cost).__name__}", regulariser.l2, attained)
    if not _is_affine(loss, samples):
        return Convexity("the model is not linear in its parameters", regulariser.l2, attained)
    return Convexity(None, regulariser.l2, attained, Bounds(curvature, gram, cost.quadratic))


def _is_affine(loss: RowLoss, samples: Any) -> bool:
    """Whether model(x + y) + model(0) = model(x) + model(y) at two random points, which decides it."""
    generator, x0 = torch.Generator().manual_seed(0), loss.model.x0
    x, y = torch.randn(2, len(x0), dtype=torch.float64, generator=generator).to(x0)
    with torch.no_grad():
        outputs = [loss.outputs(at, samples) for at in (x + y, torch.zeros_like(x), x, y)]
    together, zero, first, second = outputs
    scale = first.abs().max() + second.abs().max()
    return bool((together + zero - first - second).abs().max() <= 1e-10 * scale)


class SquaredOutputs(Loss):
    """||outputs||^2 / 2, whose Hessian in the parameters of an affine model is the Gram matrix."""

    has_accuracy: ClassVar[bool] = False

    def outputs(self, classes: int | None) -> int:
        raise NotImplementedError

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        raise NotImplementedError

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.reshape(len(targets), -1).square().sum(-1) / 2
