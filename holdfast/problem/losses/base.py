"""What a loss is: its value per sample or batch, the targets it takes and the accuracy it implies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.tree import Tree
from holdfast.data.samples import TARGET_NAMES, targets_of
from holdfast.problem.forward import forward

# --- what a loss is -------------------------------------------------------------------------------------


class Loss(ABC):
    """The cost of a model's outputs for a batch, given targets ``[B, ...]``."""

    has_accuracy: bool = True
    accuracy_by_trial: ClassVar[bool] = False  # True: ``check`` finds out whether there is an accuracy
    per_sample: bool = True  # whether ``values`` are [B]; or [], one number for the batch, mostly a mean
    calls: str = ""  # which function of the user calls the model, for messages; "": none
    traceable: bool = False  # True: ``values`` does the same in every call, so it may be traced
    quadratic: ClassVar[bool] = False  # True: its Hessian in the outputs is ``curvature`` everywhere

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Not inherited: a subclass that overrides ``values`` has to declare these itself.
        cls.traceable = vars(cls).get("traceable", False)
        cls.quadratic = vars(cls).get("quadratic", False)
        if "values" in vars(cls) and "differentiable" not in vars(cls):
            cls.differentiable = Loss.differentiable  # type: ignore[method-assign]

    @abstractmethod
    def outputs(self, classes: int | None) -> int:
        """How many numbers the model has to give for each sample; ``classes`` is None for regression."""

    @abstractmethod
    def check_targets(self, targets: Tensor, classes: int | None) -> None:
        """Raises unless the targets ``[N, ...]`` suit this loss; called once for a data set."""

    def counted(self, targets: Tensor) -> Tensor | None:
        """[N] bool: the samples whose targets ``[N, ...]`` count; None if all do.

        The others are left out of the data: a loss of 0 would enter the mean.
        """
        return None

    @abstractmethod
    def values(self, outputs: Any, targets: Tensor) -> Tensor:
        """The loss of each sample, ``[B]``; or of the batch, ``[]``, if not ``per_sample``."""

    def differentiable(self, outputs: Any, targets: Tensor) -> Tensor:
        """``values`` in a form that may be faster to differentiate."""
        return self.values(outputs, targets)

    @property
    def curvature(self) -> float | None:
        """Of a convex loss: a bound on the eigenvalues of its Hessian in the outputs; infinite for kinks.

        None where no bound is known.
        """
        return None

    def correct(self, outputs: Any, targets: Tensor) -> Tensor:
        """1.0 for each sample that is classified correctly, else 0.0: ``[B]``."""
        raise HoldfastError(f"the loss {type(self).__name__} has no accuracy: it is for regression")

    def to(self, like: Tensor) -> Loss:
        """The same where ``like`` is and in its type, for losses that hold tensors."""
        return self

    # --- of a model and a batch of samples, as a row's loss calls them --------------------------------------

    def costs(self, model: nn.Module, samples: Tree) -> Tensor:
        """``values`` of the model's outputs."""
        return self.values(forward(model, samples), self._targets(samples))

    def slopes(self, model: nn.Module, samples: Tree) -> Tensor:
        """``differentiable`` of the model's outputs."""
        return self.differentiable(forward(model, samples), self._targets(samples))

    def tested(self, model: nn.Module, samples: Tree) -> Tensor:
        """[2]: the number of samples that are classified correctly, and the sum of their losses."""
        outputs, targets = forward(model, samples), self._targets(samples)
        values = self.values(outputs, targets)
        loss = values.sum() if self.per_sample else values * len(targets)
        correct = self.correct(outputs, targets).sum() if self.has_accuracy else torch.zeros_like(loss)
        return torch.stack([correct, loss])

    def first_part(self, model: nn.Module, samples: Tree) -> Any:
        """What is tried before targets are checked: the outputs."""
        return forward(model, samples)

    def check(self, outputs: Any, targets: Tensor | None) -> None:
        """Raises unless ``targets`` [N, ...], all of a data set, suit the ``outputs`` [2, ...] of a batch."""
        if targets is None:
            raise HoldfastError(
                f"the loss {type(self).__name__} needs targets: call a column one of "
                f"{', '.join(TARGET_NAMES)}, or give step=, a function of the model and a batch"
            )
        if not isinstance(outputs, Tensor):
            raise HoldfastError(
                f"the loss {type(self).__name__} needs a model that gives one tensor, or has logits; it "
                f"gives {type(outputs).__name__}. Give a loss of your own, a function of outputs and targets"
            )
        some = targets[: len(outputs)]
        self.values(torch.zeros(outputs.shape), torch.zeros_like(some, device="cpu"))
        self.check_targets(targets, self.classes_of(outputs, targets))

    def classes_of(self, outputs: Any, targets: Tensor | None) -> int | None:
        """How many classes the labels may have by the ``outputs`` [2, ...]; None if targets are no labels."""
        if not isinstance(outputs, Tensor) or targets is None or targets.is_floating_point():
            return None
        if outputs.ndim < 2:
            return 2
        return max(outputs.shape[class_dimension(outputs, targets[: len(outputs)])], 2)

    def _targets(self, samples: Tree) -> Tensor:
        targets = targets_of(samples)
        assert targets is not None  # see ``check``
        return targets


LOSSES: Registry[Loss] = Registry("loss")


def expect(met: bool, expected: str, got: object, do: str = "") -> None:
    """Complains about labels unless ``met``; ``do``: how to mend it."""
    if not met:
        raise HoldfastError(f"labels should be {expected}, got {got}{do and '; '}{do}")


def class_dimension(outputs: Tensor, targets: Tensor) -> int:
    """Which dimension of ``outputs`` counts classes: the last, or the second, as torch has it."""
    last = outputs.shape[:-1] == targets.shape
    second = outputs.ndim > 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(targets.shape)
    if last and second and outputs.ndim > 2:
        raise HoldfastError(
            f"outputs {tuple(outputs.shape)} for targets {tuple(targets.shape)}: classes may be the second "
            "or the last dimension; give loss=, a function of outputs and targets, that says which"
        )
    return 1 if second else -1


# --- what is added to every node's loss -----------------------------------------------------------------


class Term(NamedTuple):
    """A function of one number, whose sum over all x_k a regulariser adds."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    least: float  # bounds of the curvature, wherever there is one; below 0, the term is not convex
    most: float


def _times(term: Term) -> float:
    """A coefficient, by default 0, of ``term``."""
    return field(default=0.0, metadata={"term": term})


@dataclass(frozen=True)
class Regulariser:
    """The sum of its terms, each times the coefficient that has its name. A new term is a field here."""

    l2: float = _times(Term(lambda x: x.square() / 2, lambda x: x, torch.ones_like, 1.0, 1.0))
    nonconvex: float = _times(  # x^2 / (1 + x^2), as in FedPD's paper
        Term(
            lambda x: x.square() / (1 + x.square()),
            lambda x: 2 * x / (1 + x * x) ** 2,
            lambda x: 2 * (1 - 3 * x * x) / (1 + x * x) ** 3,
            -0.5,
            2.0,
        )
    )
    l1: float = _times(Term(torch.abs, torch.sign, torch.zeros_like, 0.0, 0.0))  # but for its kink at 0

    @classmethod
    def names(cls) -> set[str]:
        """Of the terms; options of a run have the same."""
        return {one.name for one in fields(cls)}

    @cached_property
    def terms(self) -> list[tuple[float, Term]]:
        """Those with a coefficient above 0."""
        given = [(getattr(self, one.name), one.metadata["term"]) for one in fields(self)]
        return [(weight, term) for weight, term in given if weight]

    def value(self, x: Tensor) -> Tensor:
        """[...] for x [..., d]."""
        total = x.new_zeros(x.shape[:-1])
        for weight, term in self.terms:
            total = total + weight * term.value(x).sum(-1)
        return total

    def add_grad(self, gradient: Tensor, x: Tensor) -> Tensor:
        """``gradient`` [..., d] plus the regulariser's own at ``x``."""
        for weight, term in self.terms:
            gradient = torch.add(gradient, term.gradient(x), alpha=weight)
        return gradient

    def curvature(self, x: Tensor) -> Tensor:
        """The diagonal of the regulariser's Hessian at ``x``, [..., d]."""
        total = torch.zeros_like(x)
        for weight, term in self.terms:
            total = total + weight * term.curvature(x)
        return total

    @property
    def convex(self) -> bool:
        return all(term.least >= 0 for _, term in self.terms)

    @property
    def least(self) -> float:
        """A bound below every curvature of the convex terms: they are so strongly convex."""
        return sum(weight * max(term.least, 0.0) for weight, term in self.terms)

    @property
    def most(self) -> float:
        """A bound above every curvature."""
        return sum(weight * term.most for weight, term in self.terms)
