"""Losses of real targets: one number per sample, or any shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Positive, check_fields
from holdfast.problem.losses.base import LOSSES, Loss, expect


class _Regression(Loss):
    """Finite floating-point targets [B, ...], outputs of the same shape; [B] and [B, 1] count as the same."""

    has_accuracy = False

    def outputs(self, classes: int | None) -> int:
        return 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        expect(targets.is_floating_point(), "floating-point numbers", targets.dtype, "give y.float()")
        outside = targets[~targets.isfinite()]
        expect(outside.numel() == 0, "finite", outside[:1].tolist())


@LOSSES.register("squared-error")
@dataclass(frozen=True)
class SquaredError(_Regression):
    """Half the squared error, ||z - y||^2 / 2, of outputs z: regression, no accuracy."""

    traceable = True
    quadratic: ClassVar[bool] = True

    @property
    def curvature(self) -> float:
        return 1.0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _errors(outputs, targets).square().flatten(1).sum(-1) / 2


@LOSSES.register("mse")
@dataclass(frozen=True)
class MeanSquaredError(_Regression):
    """The mean of (z - y)^2 over a sample's outputs, as ``torch.nn.MSELoss``."""

    traceable = True

    @property
    def curvature(self) -> float:
        return 2.0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return per_sample_mean(_errors(outputs, targets).square())


@LOSSES.register("l1")
@dataclass(frozen=True)
class AbsoluteError(_Regression):
    """The mean of |z - y| over a sample's outputs, as ``torch.nn.L1Loss``."""

    traceable = True

    @property
    def curvature(self) -> float:
        return math.inf

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return per_sample_mean(_errors(outputs, targets).abs())


@LOSSES.register("huber")
@dataclass(frozen=True)
class Huber(_Regression):
    """(z - y)^2 / 2 up to ``delta``, then delta (|z - y| - delta/2); the mean over a sample's outputs."""

    traceable = True

    delta: Positive = 1.0

    def __post_init__(self) -> None:
        check_fields("Huber", self)

    @property
    def curvature(self) -> float:
        return 1.0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = _errors(outputs, targets)
        return per_sample_mean(
            functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=self.delta)
        )


@LOSSES.register("bce")
@dataclass(frozen=True)
class BinaryCrossEntropy(_Regression):
    """Cross entropy of sigmoid(z) with targets from 0 to 1 (floats), as ``torch.nn.BCEWithLogitsLoss``.

    Several outputs per sample are several labels; accuracy is the share of them on the right side of 1/2.
    """

    traceable = True
    has_accuracy = True

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        super().check_targets(targets, classes)
        outside = targets[(targets < 0) | (targets > 1)]
        expect(outside.numel() == 0, "from 0 to 1", outside[:1].tolist())

    @property
    def curvature(self) -> float:
        return 0.25

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        z = like_targets(outputs, targets)
        return per_sample_mean(functional.softplus(z) - targets * z)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return per_sample_mean(((like_targets(outputs, targets) > 0) == (targets > 0.5)).to(outputs.dtype))


def per_sample_mean(values: Tensor) -> Tensor:
    """The mean over all but the first dimension, [B]."""
    return values if values.ndim == 1 else values.flatten(1).mean(-1)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    errors = like_targets(outputs, targets) - targets
    return errors if errors.ndim > 1 else errors[:, None]


def like_targets(outputs: Tensor, targets: Tensor) -> Tensor:
    """``outputs`` in the shape of the targets; [B] and [B, 1] may stand for one another, nothing else.

    Anything else would broadcast against the targets.
    """
    shapes = (targets.shape, (*targets.shape, 1), (*targets.shape[:1], *targets.shape[2:]))
    if outputs.shape == targets.shape or (outputs.numel() == targets.numel() and outputs.shape in shapes):
        return outputs.reshape(targets.shape)
    if targets.ndim == 1:
        raise HoldfastError(
            f"the model should give one number for each of {len(targets)} samples, got {tuple(outputs.shape)}"
        )
    raise HoldfastError(
        f"the model should give numbers of the shape of the targets, {tuple(targets.shape)}, got "
        f"{tuple(outputs.shape)}"
    )
