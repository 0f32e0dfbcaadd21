"""A user's own losses: a function of outputs and targets, or a training step of the model and a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.core.validation import quoted
from holdfast.data.samples import IGNORED
from holdfast.problem.losses.base import LOSSES, Loss

# --- A user's loss is tried before training -------------------------------------------------------------


Function = Callable[[Any, Any], Any]


def tried(title: str, function: Function, outputs: Any, targets: Tensor) -> Any:
    """``function`` of the ``outputs`` of two samples, and of two of all ``targets`` [N, ...]."""
    some = targets[_rows(targets)[: len(next(leaves(outputs)))]]
    # Cloned, so that they are no leaves: a loss may change outputs in place.
    at = tree_map(lambda part: part.detach().requires_grad_(part.is_floating_point()).clone(), outputs)
    try:
        with torch.enable_grad():
            value = function(at, some)
            differentiable = isinstance(value, Tensor) and value.requires_grad
            if differentiable:
                value.sum().backward()
    except Exception as error:  # the user's own code
        given = ", ".join(str(tuple(part.shape)) for part in leaves(outputs))
        why = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
        raise HoldfastError(
            f"{title} fails on outputs {given} and targets {tuple(some.shape)} of {some.dtype}: "
            f"{why}{_advice(outputs, targets)}"
        ) from error
    if isinstance(value, Tensor) and not differentiable:
        raise HoldfastError(
            f"{title} has no gradient: leave out what cuts it off from the outputs, such as detach(), "
            "argmax() or a comparison"
        )
    return value


def check_broadcasting(title: str, function: Function, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a mean over all pairs of an output and a target, which [B, 1] and [B] give by mistake.

    A mean over samples is the mean of what single samples give. If this does not hold, but holds once outputs
    have the shape of the targets, they were broadcast against each other.
    """
    if outputs.shape[1:] == targets.shape[1:] or outputs[0].numel() != targets[0].numel():
        return
    others = torch.nonzero((targets != targets[0]).view(len(targets), -1).any(1))
    if not len(others):
        return
    pair = targets[[0, int(others[0])]]
    z = torch.linspace(0.25, 0.75, pair.numel(), dtype=outputs.dtype, device=outputs.device)
    z = z.view(2, *outputs.shape[1:])
    try:
        with warnings.catch_warnings():  # torch warns of some broadcasts, also of ours
            warnings.simplefilter("ignore")
            single = torch.stack([function(z[i : i + 1].clone(), pair[i : i + 1]) for i in range(2)]).mean()
            given, alike = function(z.clone(), pair), function(z.clone().view(pair.shape), pair)
    except Exception:  # the user's own code, which wants outputs of the shape that they have
        return
    if torch.isclose(alike, single) and not torch.isclose(given, single):
        raise HoldfastError(
            f"{title}: outputs {tuple(z.shape)} and targets {tuple(pair.shape)} are broadcast, so that every "
            "output is compared with every target; give targets in the shape of the outputs, such as "
            "y[:, None], or squeeze the outputs in the loss"
        )


def _rows(targets: Tensor) -> list[int]:
    """Two samples to try a loss on; one has the largest label, which may be out of range."""
    if targets.is_floating_point():
        return list(range(len(targets)))[:2]
    largest = int(targets.view(len(targets), -1).amax(1).argmax())
    return [largest, 1 if largest == 0 and len(targets) > 1 else 0]


def _advice(outputs: Any, targets: Tensor) -> str:
    """What may be wrong with the targets, as far as shapes and types tell."""
    if not isinstance(outputs, Tensor) or outputs.ndim < 2:
        return ""
    if outputs.shape[1] > 1 and targets.is_floating_point() and targets.ndim == 1:
        return "; class numbers are int64: give y.long()"
    if targets.is_floating_point():
        return ""
    if outputs.ndim > 2 and outputs.shape[1:-1] == targets.shape[1:]:
        return (
            "; losses of torch want classes second, the model has them last: give loss='cross-entropy', "
            "which takes both, or a function that calls yours with outputs.movedim(-1, 1)"
        )
    if outputs.shape[1:] == targets.shape[1:] or outputs.shape[1] == 1:
        return "; real targets are floats: give y.float()"
    if targets.ndim > 1 and targets.shape[-1] == 1:
        return "; class numbers have no dimension of their own: give y.squeeze(-1)"
    if (largest := int(targets.max())) >= outputs.shape[1]:
        return (
            f"; labels go up to {largest}, and the model has {outputs.shape[1]} outputs: count classes from "
            "0, or give it more"
        )
    return ""


# --- losses that users bring ----------------------------------------------------------------------------


LossFunction = Callable[[Any, Any], Any]
Step = Callable[[nn.Module, Any], Tensor]


class OwnLoss(Loss):
    """A callable ``loss(outputs, targets)`` that returns a number for each sample, [B], or for the batch, [].

    One number for a batch counts like the mean of its samples, as torch's losses are by default.
    """

    accuracy_by_trial: ClassVar[bool] = True
    per_sample = False  # until ``check`` has seen otherwise: right for both, and slower

    def __init__(self, function: LossFunction) -> None:
        self.function = function
        self.has_accuracy = False
        self.traceable = type(function).__module__.startswith("torch.nn.")

    def __repr__(self) -> str:
        return name_of(self.function)

    def to(self, like: Tensor) -> OwnLoss:
        """The same where ``like`` is and in its type, with its own tensors, such as weights of classes."""
        if not isinstance(self.function, nn.Module):
            return self
        moved = OwnLoss(deepcopy(self.function).to(like.device, like.dtype))
        moved.per_sample, moved.has_accuracy = self.per_sample, self.has_accuracy
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
        self.has_accuracy = scores and labels
        if isinstance(outputs, Tensor) and not self.per_sample:
            check_broadcasting(f"loss {self!r}", self.function, outputs, there)

    def values(self, outputs: Any, targets: Tensor) -> Tensor:
        values: Tensor = self.function(outputs, targets)
        return values

    def correct(self, outputs: Any, targets: Tensor) -> Tensor:
        right: Tensor = outputs.argmax(1) == targets
        return right.to(outputs.dtype)


class OwnStep(Loss):
    """A user's training step: ``step(model, batch)`` returns the loss of the batch, [] or [B].

    The forward pass is the user's, such as ``lambda model, batch: model(**batch).loss``.
    """

    has_accuracy = False
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

    def costs(self, model: nn.Module, samples: Tree) -> Tensor:
        loss = self.step(model, samples)
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise TypeError(f"step must return the loss as a tensor, got {quoted(loss)}")
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss

    slopes = costs

    def first_part(self, model: nn.Module, samples: Tree) -> Tensor:
        loss = self.costs(model, samples)
        shaped_per_sample("step", loss, len(next(leaves(samples))))
        return loss

    def tested(self, model: nn.Module, samples: Tree) -> Tensor:
        loss = self.costs(model, samples)
        total = loss.sum() if self.per_sample else loss * len(next(leaves(samples)))
        return torch.stack([torch.zeros_like(total), total])


@LOSSES.register("training-step")
class TrainingStep(OwnStep):
    """The loss that the model's own ``training_step(batch)`` returns, as in Lightning."""

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
    """Whether a loss returns a number for each sample; raises if it is neither that nor one number."""
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
