"""Warm-up and cosine decay, counted in local steps, around any other rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer, Memory, Optimizer
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, NonNegative, Whole
from holdfast.optimizers.sgd import PLAIN

NOTHING = 0.1  # of a step


class Steps(NamedTuple):
    t: Tensor  # [..., 1]: local steps that the node has taken, in all rounds
    inner: Memory


@OPTIMIZERS.register("warmup-cosine")
@dataclass(frozen=True, repr=False)
class WarmupCosine(LocalOptimizer):
    """Steps of ``inner`` times a factor that rises to 1 in ``warmup`` local steps, then falls along a cosine.

    It falls until the node has taken ``steps`` steps and stays at ``end``; without ``steps`` it stays at 1.
    Steps are those of all rounds, also where ``inner`` begins again in each.
    """

    columnwise: ClassVar[bool] = True

    keep: bool = field(default=True, init=False)  # the counter; the rest as ``inner`` says
    warmup: Whole = 100
    steps: Count | None = None
    end: NonNegative = 0.0  # of the cosine: a share of the step size
    inner: Optimizer = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and self.steps <= self.warmup:
            raise HoldfastError(
                f"WarmupCosine.steps: should be more than warmup = {self.warmup}, got {self.steps}; count "
                "all local steps of a node, rounds times local_steps"
            )

    @property
    def rescales(self) -> bool:
        return self.inner.rescales

    @property
    def ends(self) -> int | None:
        return self.steps if self.steps is not None and self.end < NOTHING else self.inner.ends

    def factor(self, t: Tensor) -> Tensor:
        """What the step after ``t`` others is multiplied by."""
        rising = torch.clamp((t + 1) / max(self.warmup, 1), max=1.0)
        if self.steps is None:
            return rising
        progress = torch.clamp((t - self.warmup) / (self.steps - self.warmup), 0.0, 1.0)
        return rising * (self.end + (1 - self.end) * (1 + torch.cos(math.pi * progress)) / 2)

    def init(self, x: Tensor) -> Steps:
        return Steps(t=torch.zeros_like(x[..., :1]), inner=self.inner.init(x))

    def begin(self, memory: Steps, x: Tensor) -> Steps:
        return Steps(memory.t, self.inner.begin(memory.inner, x))

    def kept(self, memory: Steps) -> Steps:
        return Steps(memory.t, self.inner.kept(memory.inner))

    def update(self, gradient: Tensor, memory: Steps, x: Tensor) -> tuple[Tensor, Steps]:
        direction, inner = self.inner.update(gradient, memory.inner, x)
        return self.factor(memory.t) * direction, Steps(memory.t + 1, inner)
