"""Gradient clipping in front of any other rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer, Memory, Optimizer
from holdfast.contract.parameters import Rate
from holdfast.optimizers.sgd import PLAIN


@OPTIMIZERS.register("clip")
@dataclass(frozen=True, repr=False)
class Clip(LocalOptimizer):
    """Scales a node's gradient down to norm ``max_norm`` if it is longer, then steps as ``inner`` says.

    As torch.nn.utils.clip_grad_norm_ before an optimiser. Each node's norm is its own.
    """

    columnwise: ClassVar[bool] = True  # zeros behind a row do not change its norm

    keep: bool = field(default=False, init=False)  # as ``inner`` says
    max_norm: Rate = 1.0
    inner: Optimizer = PLAIN

    @property
    def rescales(self) -> bool:
        return self.inner.rescales

    @property
    def ends(self) -> int | None:
        return self.inner.ends

    def init(self, x: Tensor) -> Memory:
        return self.inner.init(x)

    def begin(self, memory: Memory, x: Tensor) -> Memory:
        return self.inner.begin(memory, x)

    def kept(self, memory: Memory) -> Memory:
        return self.inner.kept(memory)

    def update(self, gradient: Tensor, memory: Memory, x: Tensor) -> tuple[Tensor, Memory]:
        norm = gradient.square().sum(-1, keepdim=True).sqrt()
        share = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)  # 1e-6: torch's guard against 0/0
        return self.inner.update(gradient * share, memory, x)
