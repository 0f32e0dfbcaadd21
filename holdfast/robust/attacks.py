"""Attacks as published. ``m`` is a message; means and deviations are over the messages of honest senders."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from holdfast.contract.aggregation import ATTACKS, Attack
from holdfast.core.validation import Positive


@ATTACKS.register("sign-flip")
@dataclass(frozen=True)
class SignFlip(Attack):
    """Attackers send -scale times their message: with a server, steps in the opposite direction."""

    scale: Positive = 1.0

    def forge(self, messages: Tensor, attackers: Tensor, nodes: int) -> Tensor:
        return torch.where(attackers, -self.scale * messages, messages)


@ATTACKS.register("little-is-enough")
@dataclass(frozen=True)
class LittleIsEnough(Attack):
    """ALIE: mean - z deviation, hidden in the spread of honest messages (Baruch et al. 2019, Alg. 3).

    By default z is the largest with which enough honest nodes lie further out than the attackers. Of n nodes,
    a of them attackers, s = floor(n/2 + 1) - a have to: z is the (n - a - s)/(n - a) quantile of a normal.
    """

    z: Positive | None = None  # None: as published, from the numbers of nodes and attackers

    def forge(self, messages: Tensor, attackers: Tensor, nodes: int) -> Tensor:
        mean, deviation = honest_moments(messages, attackers)
        z = self.published(nodes) if self.z is None else self.z
        return torch.where(attackers, mean - z * deviation, messages)

    def published(self, nodes: int) -> float:
        """z for so many ``nodes``; 0 where even the mean is beyond half of the honest nodes."""
        honest = nodes - len(self.nodes)
        supporters = nodes // 2 + 1 - len(self.nodes)
        share = (honest - supporters) / honest
        return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


@ATTACKS.register("inner-product")
@dataclass(frozen=True)
class InnerProduct(Attack):
    """IPM: -scale times the honest mean, so that the sum may point the other way (Xie et al. 2020)."""

    scale: Positive = 0.5

    def forge(self, messages: Tensor, attackers: Tensor, nodes: int) -> Tensor:
        return torch.where(attackers, -self.scale * honest_moments(messages, attackers)[0], messages)


@ATTACKS.register("label-flip")
@dataclass(frozen=True)
class LabelFlip(Attack):
    """Attackers learn from class C - 1 - y in place of y, and send what they learned."""

    poisons = True

    def labels(self, labels: Tensor, classes: int) -> Tensor:
        return classes - 1 - labels


def honest_moments(messages: Tensor, attackers: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, each [d], of the rows of ``messages`` [m, d] that do not lie.

    Where all senders of a cohort lie, those of what they would have sent.
    """
    counted = ((~attackers) | attackers.all()).to(messages.dtype)  # [m, 1]
    mean = (counted * messages).sum(0) / counted.sum()
    return mean, ((counted * (messages - mean).square()).sum(0) / counted.sum()).sqrt()
