"""Losses per sample, the labels they take and the accuracy they imply."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import NonNegative, check_fields


class Loss(ABC):
    """The cost of a model's outputs for a batch (``[B, C]``, ``[B, 1]``, ``[B]``), given targets ``[B]``."""

    has_accuracy: ClassVar[bool] = True
    traceable: ClassVar[bool] = False  # True: ``values`` does the same in every call, so it may be traced
    quadratic: ClassVar[bool] = False  # True: its Hessian in the outputs is ``curvature`` everywhere

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited: a subclass that overrides ``values`` has to declare these anew.
        cls.traceable = vars(cls).get("traceable", False)
        cls.quadratic = vars(cls).get("quadratic", False)
        if "values" in vars(cls) and "differentiable" not in vars(cls):
            cls.differentiable = Loss.differentiable  # type: ignore[method-assign]

    @abstractmethod
    def outputs(self, classes: int | None) -> int:
        """How many numbers the model has to give for each sample; ``classes`` is None for regression."""

    @abstractmethod
    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        """Raises unless the labels ``[N]`` suit this loss; called once for a data set."""

    @abstractmethod
    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample, ``[B]``."""

    def differentiable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``values`` in a form that may be faster to differentiate."""
        return self.values(outputs, targets)

    @property
    def curvature(self) -> float | None:
        """Of a convex loss: a bound on the eigenvalues of its Hessian in the outputs; infinite for kinks.

        None where no bound is known.
        """
        return None

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """1.0 for each sample that is classified correctly, else 0.0: ``[B]``."""
        raise HoldfastError(f"the loss {type(self).__name__} has no accuracy: it is for regression")


LOSSES: Registry[Loss] = Registry("loss")


class _Multiclass(Loss):
    """Class numbers 0 .. C-1 (int64) as targets, one score for each class as outputs."""

    def outputs(self, classes: int | None) -> int:
        if classes is None:
            raise HoldfastError(
                f"the loss {type(self).__name__} needs class labels, this data has none: use 'squared-error'"
            )
        return classes

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        last = self.outputs(classes) - 1
        _expect(targets.ndim == 1, "one class number per sample", f"shape {tuple(targets.shape)}")
        _expect(targets.dtype == torch.int64, "class numbers of type int64", targets.dtype)
        outside = targets[(targets < 0) | (targets > last)]
        _expect(outside.numel() == 0, f"class numbers from 0 to {last}", outside[:1].tolist())

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (_scores(outputs, targets).argmax(-1) == targets).to(outputs.dtype)


@LOSSES.register("cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(_Multiclass):
    """Cross entropy of the softmax (multinomial logistic regression)."""

    traceable: ClassVar[bool] = True

    @property
    def curvature(self) -> float:
        return 0.5  # of diag(p) - p p^T, for p = (1/2, 1/2, 0, ...)

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = _scores(outputs, targets)
        right = torch.arange(scores.shape[-1], device=scores.device) == targets[:, None]
        return scores.logsumexp(-1) - torch.where(right, scores, 0).sum(-1)

    def differentiable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Stacked on a CPU, torch.softmax and one_hot would take several times as long: results of narrow
        # layers lie class by class in memory, and here everything stays as it lies.
        at = _scores(outputs, targets).detach()
        shifted = at - at.amax(-1, keepdim=True)
        above = shifted.exp()
        total = above.sum(-1, keepdim=True)
        right = (torch.arange(at.shape[-1], device=at.device)[:, None] == targets).mT.to(at.dtype)
        slopes = above / total - right
        values = total.squeeze(-1).log() - (shifted * right).sum(-1)
        return values + ((outputs - at) * slopes).sum(-1)  # the second term is zero; only its slope counts


@LOSSES.register("hinge")
@dataclass(frozen=True)
class Hinge(_Multiclass):
    """Multi-class hinge with margin 1: the sum over the wrong classes j of max(0, 1 - s_y + s_j), over C.

    ``smoothing`` > 0 rounds each kink off by a parabola of that width, for solvers by gradient steps; it
    lowers the loss by at most smoothing/2. (The dual, the other way to treat kinks, has a variable for every
    sample and class, where methods keep and exchange vectors like the model.)
    """

    traceable: ClassVar[bool] = True

    smoothing: NonNegative = 0.0

    def __post_init__(self) -> None:
        check_fields("Hinge", self)

    @property
    def curvature(self) -> float:
        return 1 / self.smoothing if self.smoothing else math.inf  # C/C: a star's Laplacian over C

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = _scores(outputs, targets)
        right = targets[:, None]
        excess = functional.relu(1 - scores.gather(-1, right) + scores)
        if self.smoothing:
            inner = excess.clamp(max=self.smoothing)
            excess = excess - inner + inner.square() / (2 * self.smoothing)
        wrong = torch.arange(scores.shape[-1], device=scores.device) != right
        return (excess * wrong).mean(-1)


@LOSSES.register("logistic")
@dataclass(frozen=True)
class Logistic(Loss):
    """Binary logistic log(1 + exp(-b z)) of one output z; labels b are -1/+1 (float) or 0/1 (int64)."""

    traceable: ClassVar[bool] = True

    def outputs(self, classes: int | None) -> int:
        if classes not in (None, 2):
            raise HoldfastError(
                f"the loss Logistic takes two classes, this data has {classes}: use 'cross-entropy'"
            )
        return 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        self.outputs(classes)
        _expect(targets.ndim == 1, "one label per sample", f"shape {tuple(targets.shape)}")
        floating = targets.is_floating_point()
        _expect(floating or targets.dtype == torch.int64, "-1/+1 (float) or 0/1 (int64)", targets.dtype)
        low = -1 if floating else 0
        outside = targets[(targets != low) & (targets != 1)]
        _expect(outside.numel() == 0, f"{low} or 1 where their type is {targets.dtype}", outside[:1].tolist())

    @property
    def curvature(self) -> float:
        return 0.25

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # The type of the labels, not their values, says which kind they are: no guessing per batch.
        signs = targets if targets.is_floating_point() else 2 * targets - 1
        return -functional.logsigmoid(signs * _single(outputs, targets))

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((_single(outputs, targets) > 0) == (targets > 0)).to(outputs.dtype)


@LOSSES.register("squared-error")
@dataclass(frozen=True)
class SquaredError(Loss):
    """Half the squared error, (z - y)^2 / 2, of one output z: regression, no accuracy."""

    traceable: ClassVar[bool] = True
    quadratic: ClassVar[bool] = True
    has_accuracy: ClassVar[bool] = False

    def outputs(self, classes: int | None) -> int:
        return 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        _expect(targets.ndim == 1, "one number per sample", f"shape {tuple(targets.shape)}")
        _expect(targets.is_floating_point(), "floating-point numbers", targets.dtype)
        outside = targets[~targets.isfinite()]
        _expect(outside.numel() == 0, "finite", outside[:1].tolist())

    @property
    def curvature(self) -> float:
        return 1.0

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (_single(outputs, targets) - targets).square() / 2


def _expect(met: bool, expected: str, got: object) -> None:
    if not met:
        raise HoldfastError(f"labels should be {expected}, got {got}")


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.ndim != 2 or len(outputs) != len(targets):
        raise HoldfastError(
            f"the model should give scores of shape ({len(targets)}, classes), got {tuple(outputs.shape)}"
        )
    return outputs


def _single(outputs: Tensor, targets: Tensor) -> Tensor:
    """``[B]`` or ``[B, 1]`` as ``[B]``: nothing else, or it would broadcast against the targets."""
    if outputs.shape not in (targets.shape, (*targets.shape, 1)):
        raise HoldfastError(
            f"the model should give one number for each of {len(targets)} samples, got {tuple(outputs.shape)}"
        )
    return outputs.reshape(targets.shape)
