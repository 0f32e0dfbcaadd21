"""Momentum: steps along a decaying mean, or sum, of the gradients so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.contract.parameters import Weight
from holdfast.optimizers.sgd import absent, decayed

Decay = Annotated[float, Field(ge=0, lt=1)]


class Velocity(NamedTuple):
    m: Tensor


@OPTIMIZERS.register("momentum")
@dataclass(frozen=True, repr=False)
class Momentum(LocalOptimizer):
    """Steps along m = beta m + (1 - beta) gradient, or along the sum m = beta m + gradient.

    The mean is at most as long as a gradient. The sum, which PyTorch and PD-SGDM take, grows to 1/(1 - beta)
    times that: ``lr`` has to be so much smaller.
    """

    columnwise: ClassVar[bool] = True

    beta: Decay = 0.9  # 0 is plain SGD
    average: bool = True  # False: the sum
    nesterov: bool = False  # look ahead: the direction is that of the next step if the gradient stayed
    weight_decay: Weight = 0.0  # added to the gradient is so many times x, as an l2 term would

    def init(self, x: Tensor) -> Velocity:
        return Velocity(m=torch.zeros_like(x))

    def update(self, gradient: Tensor, memory: Velocity, x: Tensor) -> tuple[Tensor, Velocity]:
        gradient = decayed(gradient, x, self.weight_decay)
        fresh = (1 - self.beta) * gradient if self.average else gradient
        m = self.beta * memory.m + fresh
        return self.beta * m + fresh if self.nesterov else m, Velocity(m)

    @property
    def plain(self) -> bool:
        return self.beta == 0 and absent(self.weight_decay)
