"""The adaptive rules of FedOpt, made for a server's steps (Reddi et al. 2021, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.core.validation import Positive
from holdfast.optimizers.momentum import Decay


class Moments(NamedTuple):
    m: Tensor  # mean of pseudo-gradients
    v: Tensor  # their squares, as the rule gathers them; begins at tau^2


@dataclass(frozen=True, repr=False)
class Adaptive(LocalOptimizer):
    """Steps along m / (sqrt(v) + tau), m = beta1 m + (1 - beta1) gradient, without bias correction."""

    beta1: Decay = 0.9
    tau: Positive = 1e-3  # how adaptive: coordinates whose changes are well below tau step as with SGD

    @property
    def rescales(self) -> bool:
        return True

    def init(self, x: Tensor) -> Moments:
        return Moments(m=torch.zeros_like(x), v=torch.full_like(x, self.tau**2))

    def gather(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, given the square of the gradient."""
        raise NotImplementedError

    def update(self, gradient: Tensor, memory: Moments, x: Tensor) -> tuple[Tensor, Moments]:
        m = self.beta1 * memory.m + (1 - self.beta1) * gradient
        v = self.gather(memory.v, gradient.square())
        return m / (v.sqrt() + self.tau), Moments(m, v)


@OPTIMIZERS.register("fedadagrad")
@dataclass(frozen=True, repr=False)
class FedAdagrad(Adaptive):
    """A server's Adagrad: v sums all squares, so steps shrink (Reddi et al. 2021)."""

    columnwise: ClassVar[bool] = True

    beta1: Decay = 0.0

    def gather(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@OPTIMIZERS.register("fedadam")
@dataclass(frozen=True, repr=False)
class FedAdam(Adaptive):
    """A server's Adam, without bias correction: v is a decaying mean of squares (Reddi et al. 2021)."""

    columnwise: ClassVar[bool] = True

    beta2: Decay = 0.99

    def gather(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@OPTIMIZERS.register("fedyogi")
@dataclass(frozen=True, repr=False)
class FedYogi(Adaptive):
    """A server's Yogi: v moves by the size of the squares, so it falls slowly (Reddi et al. 2021)."""

    columnwise: ClassVar[bool] = True

    beta2: Decay = 0.99

    def gather(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
