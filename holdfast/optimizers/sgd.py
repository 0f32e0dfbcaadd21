"""Plain gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer, Memory
from holdfast.contract.parameters import Weight


def absent(weight: float | Tensor) -> bool:
    """Whether ``weight`` is zero for good; in a replayed round a tensor stands for a scheduled number."""
    return not isinstance(weight, Tensor) and weight == 0


def decayed(gradient: Tensor, x: Tensor, weight_decay: float) -> Tensor:
    """The gradient with that of (weight_decay/2) ||x||^2 added."""
    return gradient if absent(weight_decay) else gradient + weight_decay * x


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True, repr=False)
class SGD(LocalOptimizer):
    """Steps along the gradients themselves; remembers nothing."""

    columnwise: ClassVar[bool] = True

    weight_decay: Weight = 0.0  # added to the gradient is so many times x, as an l2 term would

    def init(self, x: Tensor) -> Memory:
        return ()

    def update(self, gradient: Tensor, memory: Memory, x: Tensor) -> tuple[Tensor, Memory]:
        return decayed(gradient, x, self.weight_decay), memory

    @property
    def plain(self) -> bool:
        return absent(self.weight_decay)


PLAIN = SGD()
