"""Local optimisers: how a node turns the gradients of its local phase into steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import BeforeValidator, InstanceOf
from torch import Tensor

from holdfast.contract.parameters import Hyperparameters, Steps, turns
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import NotInherited, Registry
from holdfast.core.tree import Tree, tree_map

Memory: TypeAlias = (
    Tree  # an optimiser's state: () or a NamedTuple of tensors [..., d]; a counter is [..., 1]
)
Gradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class LocalOptimizer(NotInherited, Hyperparameters, ABC):
    """A rule for local steps ``x - lr * direction``, all nodes at once."""

    _promises = ("columnwise",)
    columnwise: ClassVar[bool] = False  # True: no number depends on how many columns d a row has

    keep: bool = field(default=False, kw_only=True)  # its memory lasts for all rounds, or begins in each

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = [f for f in fields(self) if f.init and getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in given)})"

    @abstractmethod
    def init(self, x: Tensor) -> Memory:
        """The memory before the first step from ``x``."""

    @abstractmethod
    def update(self, gradient: Tensor, memory: Memory, x: Tensor) -> tuple[Tensor, Memory]:
        """The direction of the step from ``x``, and the memory after it."""

    @property
    def may_be_padded(self) -> bool:
        """Whether zeros may follow the columns of a row: this and all of its parts are ``columnwise``."""
        return self.columnwise and super().may_be_padded

    @property
    def plain(self) -> bool:
        """Whether directions are the gradients themselves."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether directions have another unit than gradients: no correction can be learned from them."""
        return False

    @property
    def ends(self) -> int | None:
        """After how many local steps of a node all others are zero, or next to nothing; None: never."""
        return None

    def begin(self, memory: Memory, x: Tensor) -> Memory:
        """The memory before the first local step of a round, from ``x``: what was kept, or a new one."""
        return memory if self.keep else self.init(x)

    def kept(self, memory: Memory) -> Memory:
        """What is kept of the memory until the next round: a part of the method's state."""
        return memory if self.keep else ()

    def memory(self, x0: Tensor) -> Memory:
        """What a node holds before the first round."""
        return self.kept(self.init(x0))

    def single(self, gradient: Tensor, memory: Memory, x: Tensor) -> tuple[Tensor, Memory]:
        """The direction from ``x`` where a round has but one step, and the memory for the next round."""
        direction, memory = self.update(gradient, self.begin(memory, x), x)
        return direction, self.kept(memory)

    def descend(
        self, start: Tensor, gradient: Gradient, lr: float | Tensor, steps: Steps, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """The local phase: where ``steps`` steps from ``start`` end, and the memory for the next round.

        ``gradient`` is what the optimiser sees, the method's correction included. ``lr`` may be [..., 1].
        """
        return self._descend(start, lambda x, busy: gradient(x), lr, steps, memory)

    def _descend(
        self,
        start: Tensor,
        gradient: Callable[[Tensor, Tensor | None], Tensor],
        lr: float | Tensor,
        steps: Steps,
        memory: Memory,
    ) -> tuple[Tensor, Memory]:
        """``descend`` with a gradient that receives which nodes are ``busy``, [..., 1]; None: all of them."""
        x, memory = start, self.begin(memory, start)
        for busy in turns(steps):
            direction, after = self.update(gradient(x, busy), memory, x)
            direction = lr * direction  # by the same name, so that the other is freed: models may be large
            moved = x - direction
            del direction
            if busy is not None:  # a node that has taken its own steps stays where it is
                moved = torch.where(busy, moved, x)
                after = tree_map(partial(torch.where, busy), after, memory)
            x, memory = moved, after
        return x, self.kept(memory)

    def descend_and_track(
        self, start: Tensor, gradient: Gradient, lr: float, steps: Steps, memory: Memory
    ) -> tuple[Tensor, Tensor, Memory]:
        """``descend``, and the mean of the gradients that the optimiser saw, from which corrections learn.

        The mean direction would not do: a correction is added to gradients, so it needs their units and size.
        Adam's directions have other units, and a sum of momentum is many times as long.
        """
        if self.plain:
            x, memory = self.descend(start, gradient, lr, steps, memory)
            return x, (start - x) / (steps * lr), memory
        total = torch.zeros_like(start)

        def seen(x: Tensor, busy: Tensor | None) -> Tensor:
            nonlocal total
            slope = gradient(x)
            total = total + (slope if busy is None else torch.where(busy, slope, 0.0))
            return slope

        x, memory = self._descend(start, seen, lr, steps, memory)
        return x, total / steps, memory


OPTIMIZERS: Registry[LocalOptimizer] = Registry("optimizer")


def _chosen(value: Any) -> Any:
    """What ``value`` stands for; the two mistakes that users of torch make are named."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, torch.optim.Optimizer):
        raise HoldfastError(
            f"torch's {kind.__name__} holds the parameters of one model, and here every node has its own; "
            "give an optimiser of holdfast, such as hf.AdamW() or hf.Momentum()"
        )
    if isinstance(value, type) and issubclass(value, LocalOptimizer):
        raise HoldfastError(f"expected an optimiser, got its class: write {kind.__name__}()")
    return OPTIMIZERS.chosen(value)


if TYPE_CHECKING:
    Optimizer = LocalOptimizer
else:
    Optimizer = Annotated[InstanceOf[LocalOptimizer], BeforeValidator(_chosen)]
