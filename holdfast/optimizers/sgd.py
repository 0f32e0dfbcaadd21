"""Plain gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from holdfast.contract.local import OPTIMIZERS, LocalOptimizer, Memory


@OPTIMIZERS.register("sgd")
@dataclass(frozen=True)
class PlainSGD(LocalOptimizer):
    """Steps along the gradients themselves; remembers nothing."""

    columnwise: ClassVar[bool] = True

    def init(self, x: Tensor) -> Memory:
        return ()

    def update(self, gradient: Tensor, memory: Memory, x: Tensor) -> tuple[Tensor, Memory]:
        return gradient, memory

    @property
    def plain(self) -> bool:
        return True


PLAIN = PlainSGD()
