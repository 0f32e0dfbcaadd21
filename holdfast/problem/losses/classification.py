"""Losses of class labels."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import NonNegative, check_fields
from holdfast.data.samples import IGNORED
from holdfast.problem.losses.base import LOSSES, Loss, class_dimension, expect
from holdfast.problem.losses.regression import like_targets, per_sample_mean

SUMS_TO_ONE = 1e-4  # how near to 1 the outputs of a softmax sum


class _Multiclass(Loss):
    """Class numbers 0 .. C-1 (int64) as targets, one score for each class as outputs.

    Targets may be [B], or have more dimensions: tokens [B, T], pixels [B, H, W]. Those that are ``IGNORED``
    do not count: a sample's loss and accuracy are means over those that do. A sample without any
    is left out, see ``counted``.
    """

    def outputs(self, classes: int | None) -> int:
        if classes is None:
            raise HoldfastError(
                f"the loss {type(self).__name__} needs class labels, this data has none: use 'squared-error'"
            )
        return classes

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        last = self.outputs(classes) - 1
        expect(targets.dtype == torch.int64, "class numbers of type int64", targets.dtype)
        outside = targets[((targets < 0) & (targets != IGNORED)) | (targets > last)]
        do = "count classes from 0, or give the model more outputs"
        expect(outside.numel() == 0, f"class numbers from 0 to {last}", outside[:1].tolist(), do)
        if (counted := self.counted(targets)) is not None:
            empty = int(torch.nonzero(~counted)[0])
            raise HoldfastError(f"sample {empty} has no label that counts, all are {IGNORED}: leave it out")

    def counted(self, targets: Tensor) -> Tensor | None:
        if targets.is_floating_point():
            return None  # refused by ``check_targets``
        counted = (targets != IGNORED).reshape(len(targets), -1).any(1)
        return None if bool(counted.all()) else counted

    def check(self, outputs: Any, targets: Tensor | None) -> None:
        if isinstance(outputs, Tensor) and targets is not None:
            self._check_kind(outputs, targets[: len(outputs)])
        super().check(outputs, targets)

    def _check_kind(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuses targets that are no class numbers, and outputs that are no scores."""
        if do := _mending(outputs, targets):
            raise HoldfastError(
                f"{type(self).__name__} takes a class number (int64) for each row of scores; outputs are "
                f"{tuple(outputs.shape)}, targets {tuple(targets.shape)} of {targets.dtype}: {do}"
            )
        if outputs.ndim > 1 and outputs.shape[class_dimension(outputs, targets)] == 1:
            raise HoldfastError(
                f"the model gives one number for each label, and {type(self).__name__} needs one for each "
                "class: use 'logistic' or 'bce' for two classes, or a model with more outputs"
            )

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        scores = _scores(outputs, targets)
        if targets.ndim == 1:
            return self.each(scores, targets)
        flat = self.each(scores.flatten(0, -2), targets.flatten().clamp(min=0))
        return _mean_of_counted(flat.view(targets.shape), targets)

    @abstractmethod
    def each(self, scores: Tensor, classes: Tensor) -> Tensor:
        """The loss [N] of each row of ``scores`` [N, C], whose right class is that in ``classes`` [N]."""

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        right = (_scores(outputs, targets).argmax(-1) == targets).to(outputs.dtype)
        return right if targets.ndim == 1 else _mean_of_counted(right, targets)


@LOSSES.register("cross-entropy")
@dataclass(frozen=True)
class CrossEntropy(_Multiclass):
    """Cross entropy of the softmax (multinomial logistic regression)."""

    traceable = True

    @property
    def curvature(self) -> float:
        return 0.5  # of diag(p) - p p^T, for p = (1/2, 1/2, 0, ...)

    def each(self, scores: Tensor, classes: Tensor) -> Tensor:
        right = torch.arange(scores.shape[-1], device=scores.device) == classes[:, None]
        return scores.logsumexp(-1) - torch.where(right, scores, 0).sum(-1)

    def check(self, outputs: Any, targets: Tensor | None) -> None:
        super().check(outputs, targets)
        assert targets is not None
        scores = _scores(outputs.detach(), targets[: len(outputs)])
        if bool((scores >= 0).all()) and bool(((scores.sum(-1) - 1).abs() < SUMS_TO_ONE).all()):
            warnings.warn(
                "the model's outputs are probabilities, and CrossEntropy takes scores, of which it computes "
                "the softmax itself: leave the softmax of the model out",
                UserWarning,
                stacklevel=2,
            )

    def differentiable(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.ndim > 1:
            return self.values(outputs, targets)
        # Stacked on a CPU, torch.softmax and one_hot would take several times as long. Slopes lie class by
        # class in memory: the products that they enter are then up to three times as fast on a GPU.
        at = _scores(outputs, targets).detach().mT
        shifted = at - at.amax(0, keepdim=True)
        above = shifted.exp()
        total = above.sum(0, keepdim=True)
        right = torch.arange(len(at), device=at.device)[:, None] == targets
        values = total.squeeze(0).log() - torch.where(right, shifted, 0).sum(0)
        slopes = above / total - right.to(at.dtype)
        return _with_slopes(outputs, values, slopes)


class _WithSlopes(torch.autograd.Function):
    """``values`` [B] of ``outputs`` [B, C], whose derivatives are ``slopes`` [C, B]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return (gradient * slopes).mT, None, None


_with_slopes: Callable[..., Tensor] = _WithSlopes.apply


@LOSSES.register("hinge")
@dataclass(frozen=True)
class Hinge(_Multiclass):
    """Multi-class hinge with margin 1: the sum over the wrong classes j of max(0, 1 - s_y + s_j), over C.

    ``smoothing`` > 0 rounds each kink off by a parabola of that width, for solvers by gradient steps; it
    lowers the loss by at most smoothing/2. (The dual, the other way to treat kinks, has a variable for every
    sample and class, but methods keep and exchange vectors like the model.)
    """

    traceable = True

    smoothing: NonNegative = 0.0

    def __post_init__(self) -> None:
        check_fields("Hinge", self)

    @property
    def curvature(self) -> float:
        return 1 / self.smoothing if self.smoothing else math.inf  # C/C: a star's Laplacian over C

    def each(self, scores: Tensor, classes: Tensor) -> Tensor:
        right = classes[:, None]
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

    traceable = True

    def outputs(self, classes: int | None) -> int:
        if classes not in (None, 2):
            raise HoldfastError(
                f"the loss Logistic takes two classes, this data has {classes}: use 'cross-entropy'"
            )
        return 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        self.outputs(classes)
        floating = targets.is_floating_point()
        expect(floating or targets.dtype == torch.int64, "-1/+1 (float) or 0/1 (int64)", targets.dtype)
        low = -1 if floating else 0
        outside = targets[(targets != low) & (targets != 1)]
        expect(outside.numel() == 0, f"{low} or 1 where their type is {targets.dtype}", outside[:1].tolist())

    @property
    def curvature(self) -> float:
        return 0.25

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # The type of the labels, not their values, says which kind they are: no guessing per batch.
        signs = targets if targets.is_floating_point() else 2 * targets - 1
        return per_sample_mean(-functional.logsigmoid(signs * like_targets(outputs, targets)))

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return per_sample_mean(((like_targets(outputs, targets) > 0) == (targets > 0)).to(outputs.dtype))


def _scores(outputs: Tensor, targets: Tensor) -> Tensor:
    """``outputs`` with the classes last, [*targets.shape, C]."""
    scores = outputs.movedim(class_dimension(outputs, targets), -1) if outputs.ndim > 1 else outputs
    if scores.shape[:-1] != targets.shape:
        wanted = ", ".join([*map(str, targets.shape), "classes"])
        raise HoldfastError(f"the model should give scores of shape ({wanted}), got {tuple(outputs.shape)}")
    return scores


def _mending(outputs: Tensor, targets: Tensor) -> str | None:
    """What to do about ``targets`` that are no class numbers for these ``outputs``; None if they are."""
    if outputs.ndim > 1 and targets.shape == outputs.shape:
        soft = ", or, if rows are probabilities, loss=nn.CrossEntropyLoss()"
        return f"of one-hot rows give y.argmax(-1){soft if targets.is_floating_point() else ''}"
    if targets.is_floating_point():
        return "give y.long(), or for real targets a loss such as 'mse'"
    if targets.ndim > 1 and targets.shape[-1] == 1 and outputs.shape[:-1] == targets.shape[:-1]:
        return "give y.squeeze(-1)"
    return None


def _mean_of_counted(values: Tensor, targets: Tensor) -> Tensor:
    """The mean over a sample's targets that are not ``IGNORED``, [B]; 0 where none is, see ``counted``."""
    counted = (targets != IGNORED).to(values.dtype).flatten(1)
    return (values.flatten(1) * counted).sum(-1) / counted.sum(-1).clamp(min=1)
