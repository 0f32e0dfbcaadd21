"""Losses that users bring: a function of outputs and targets, or a training step of the model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.core.validation import quoted
from holdfast.data.arrays import IGNORED
from holdfast.problem.losses.base import LOSSES, Loss
from holdfast.problem.losses.trial import check_broadcasting, tried

LossFunction = Callable[[Any, Any], Any]
Step = Callable[[nn.Module, Any], Tensor]


class OwnLoss(Loss):
    """A callable ``loss(outputs, targets)`` that gives a number for each sample, [B], or for the batch, [].

    One number for a batch counts like the mean of its samples, as torch's losses are by default.
    """

    accuracy_by_trial: ClassVar[bool] = True
    per_sample = False  # until ``check`` has seen otherwise: right for both, and slower

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        self.has_accuracy = False  # type: ignore[misc]
        self.traceable = type(function).__module__.startswith("torch.nn.")  # type: ignore[misc]

    def __repr__(self) -> str:
        return name_of(self.function)

    def to(self, like: Tensor) -> OwnLoss:
        """The same where ``like`` is and in its type, with its own tensors, such as weights of classes."""
        if not isinstance(self.function, nn.Module):
            return self
        moved = OwnLoss(deepcopy(self.function).to(like.device, like.dtype))
        moved.per_sample, moved.has_accuracy = self.per_sample, self.has_accuracy  # type: ignore[misc]
        return moved

    def outputs(self, classes: int | None) -> int:
        return classes or 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        """Only the function knows."""

    def classes_of(self, outputs: Any, targets: Tensor | None) -> None:
        """Only the function knows."""

    def check(self, outputs: Any, targets: Tensor | None) -> None:
        if targets is None:
            super().check(outputs, targets)
            return
        there = targets.to(next(leaves(outputs)).device)
        value = tried(f"loss {self!r}", self.function, outputs, there)
        self.per_sample = shaped_per_sample(f"loss {self!r}", value, len(next(leaves(outputs))))
        scores = isinstance(outputs, Tensor) and outputs.ndim > 1 and outputs.shape[1] > 1
        labels = targets.ndim == 1 and not targets.is_floating_point() and not bool((there == IGNORED).any())
        self.has_accuracy = scores and labels  # type: ignore[misc]
        if isinstance(outputs, Tensor) and not self.per_sample:
            check_broadcasting(f"loss {self!r}", self.function, outputs, there)

    def values(self, outputs: Any, targets: Tensor) -> Tensor:
        values: Tensor = self.function(outputs, targets)
        return values

    def correct(self, outputs: Any, targets: Tensor) -> Tensor:
        right: Tensor = outputs.argmax(1) == targets
        return right.to(outputs.dtype)


class OwnStep(Loss):
    """A user's training step: ``step(model, batch)`` gives the loss of the batch, [] or [B].

    The forward pass is the user's, such as ``lambda model, batch: model(**batch).loss``.
    """

    has_accuracy: ClassVar[bool] = False
    per_sample = False  # until ``check`` has seen otherwise

    def __init__(self, step: Step) -> None:
        self.step = step
        self.calls = f"step {self!r}"

    def __repr__(self) -> str:
        return name_of(self.step)

    def outputs(self, classes: int | None) -> int:
        return classes or 1

    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        """Only the step knows."""

    def classes_of(self, outputs: Any, targets: Tensor | None) -> None:
        """Only the step knows."""

    def check(self, outputs: Any, targets: Tensor | None) -> None:
        self.per_sample = outputs.ndim == 1

    def values(self, outputs: Any, targets: Tensor) -> Tensor:
        raise NotImplementedError("a step has no outputs")

    def costs(self, model: nn.Module, samples: Any) -> Tensor:
        loss = self.step(model, samples)
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise TypeError(f"step must return the loss as a tensor, got {quoted(loss)}")
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss

    slopes = costs

    def first_part(self, model: nn.Module, samples: Any) -> Tensor:
        loss = self.costs(model, samples)
        shaped_per_sample("step", loss, len(next(leaves(samples))))
        return loss

    def tested(self, model: nn.Module, samples: Any) -> Tensor:
        loss = self.costs(model, samples)
        total = loss.sum() if self.per_sample else loss * len(next(leaves(samples)))
        return torch.stack([torch.zeros_like(total), total])


@LOSSES.register("training-step")
class TrainingStep(OwnStep):
    """The model's own ``training_step(batch)`` gives the loss of a batch, as in Lightning."""

    def __init__(self) -> None:
        super().__init__(_training_step)


def _training_step(model: nn.Module, batch: Any) -> Tensor:
    step = getattr(model, "training_step", None)
    if not callable(step):
        raise TypeError("the loss 'training-step' needs a model with a method training_step(batch)")
    loss: Tensor = step(batch)
    return loss


def as_loss(loss: Any) -> Loss:
    """A loss by its name, as an object, or as a function of outputs and targets."""
    if isinstance(loss, str):
        return LOSSES.build(loss, {})
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) and issubclass(loss, nn.Module | Loss):
        raise HoldfastError(
            f"loss: expected an instance, got the class {loss.__qualname__}; write {loss.__qualname__}()"
        )
    if not callable(loss):
        raise HoldfastError(
            f"loss: expected a name such as 'cross-entropy', or a function of outputs and targets, got "
            f"{quoted(loss)}"
        )
    if getattr(loss, "reduction", None) == "sum":
        raise HoldfastError(
            f"loss: {name_of(loss)} sums over the batch, so its size would depend on the batch size; use "
            "reduction='mean' or 'none'"
        )
    return OwnLoss(loss)


def shaped_per_sample(title: str, value: Any, samples: int) -> bool:
    """Whether a loss gives a number for each sample; complains if it is neither that nor one number."""
    if not isinstance(value, Tensor) or value.shape not in ((), (samples,)):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise HoldfastError(
            f"{title} gives {got} for {samples} samples; expected one number, or one for each sample"
        )
    return value.ndim == 1


def name_of(function: object) -> str:
    """What a user's function is called, without an address in memory."""
    if isinstance(function, nn.Module):
        return repr(function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__
