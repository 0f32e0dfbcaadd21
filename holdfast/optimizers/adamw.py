"""AdamW: steps of equal size in every coordinate, and a weight decay that is not rescaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.contract.parameters import Weight
from holdfast.core.validation import Positive
from holdfast.optimizers.momentum import Decay
from holdfast.optimizers.sgd import decayed


class Moments(NamedTuple):
    m: Tensor  # mean of gradients
    v: Tensor  # mean of their squares
    t: Tensor  # [..., 1]: steps so far


def unbiased(mean: Tensor, beta: float, t: Tensor) -> Tensor:
    """A decaying mean that began at zero ``t`` steps ago, over 1 - beta^t, the sum of its weights."""
    log = math.log(beta) if beta else -math.inf
    return mean / -torch.expm1(t * log)  # exact in float32, too, where 1 - beta^t loses digits


@OPTIMIZERS.register("adamw")
@dataclass(frozen=True, repr=False)
class AdamW(LocalOptimizer):
    """Adam with decoupled weight decay, as torch.optim.AdamW; ``weight_decay`` 0 makes it Adam."""

    columnwise: ClassVar[bool] = True

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    weight_decay: Weight = 0.01  # each step also takes lr times this share of x away

    @property
    def rescales(self) -> bool:
        return True

    def init(self, x: Tensor) -> Moments:
        return Moments(m=torch.zeros_like(x), v=torch.zeros_like(x), t=torch.zeros_like(x[..., :1]))

    def update(self, gradient: Tensor, memory: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        t = memory.t + 1
        m = self.beta1 * memory.m + (1 - self.beta1) * gradient
        v = self.beta2 * memory.v + (1 - self.beta2) * gradient.square()
        adam = unbiased(m, self.beta1, t) / (unbiased(v, self.beta2, t).sqrt() + self.eps)
        return decayed(adam, x, self.weight_decay), Moments(m, v, t)
