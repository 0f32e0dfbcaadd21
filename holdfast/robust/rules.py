"""Rules that bound what a few false messages do. All of them are biased where honest messages differ.

Numbers that are not finite count as the largest there are, so they are the first to be left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from holdfast.contract.aggregation import AGGREGATIONS, Aggregation, ChosenAggregation
from holdfast.contract.channel import Use
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, Positive, Whole

STEADY: frozenset[Use] = frozenset({"graph", "server", "cohort", "warm start"})


@AGGREGATIONS.register("trimmed-mean")
@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """In every coordinate the mean without the largest and smallest values (Yin et al. 2018).

    With at most ``attackers`` false messages, every coordinate is within the range of the honest ones.
    """

    serves = STEADY
    columnwise = True

    attackers: Whole  # so many values are left out at either end

    @property
    def least(self) -> int:
        return 2 * self.attackers + 1

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        return trimmed_mean(messages, present, torch.full_like(present.sum(1), self.attackers))


@AGGREGATIONS.register("median")
@dataclass(frozen=True)
class Median(Aggregation):
    """In every coordinate the median, or the mean of the middle two values (Yin et al. 2018).

    It is the trimmed mean that leaves out as many as it can: fewer than half of the messages may be false.
    """

    serves = STEADY | {"changing graph"}
    columnwise = True

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        return trimmed_mean(messages, present, (present.sum(1) - 1) // 2)


@AGGREGATIONS.register("krum")
@dataclass(frozen=True)
class Krum(Aggregation):
    """The message that is closest to its k - attackers - 2 nearest (Blanchard et al. 2017).

    ``keep`` above 1: the mean of so many of the best, Multi-Krum. That many have to be honest.
    """

    serves = STEADY

    attackers: Whole  # at most so many messages are false
    keep: Count = 1

    @property
    def least(self) -> int:
        return max(2 * self.attackers + 3, self.keep + self.attackers)

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        distances = squared_distances(messages, present)
        nearest = distances.sort(-1).values  # [m, k, k]; the first is the message itself
        counted = torch.arange(nearest.shape[-1], device=nearest.device)
        most = (present.sum(1) - self.attackers - 2)[:, None, None]
        scores = nearest.where((counted >= 1) & (counted <= most), 0.0).sum(-1)
        best = scores.where(present, torch.inf).topk(self.keep, largest=False).indices  # [m, keep]
        return messages.gather(1, best.unsqueeze(-1).expand(-1, -1, messages.shape[-1])).mean(1)


@AGGREGATIONS.register("nearest-neighbours")
@dataclass(frozen=True)
class NearestNeighbours(Aggregation):
    """Every message becomes the mean of the k - attackers nearest to it, then ``rule`` (Allouah et al. 2023).

    It takes away much of what data that differ cost a rule.
    """

    serves = STEADY

    attackers: Whole  # at most so many messages are false
    rule: ChosenAggregation = field(default_factory=lambda: Median())

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.rule, ClippedGossip) or self.rule.plain:
            raise HoldfastError(
                f"NearestNeighbours.rule: {type(self.rule).__name__} does not go with it; choose 'median', "
                "'trimmed-mean' or 'krum'"
            )

    @property
    def least(self) -> int:
        return max(2 * self.attackers + 1, self.rule.least)

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        order = squared_distances(messages, present).argsort(dim=-1, stable=True)
        kept = (present.sum(1) - self.attackers)[:, None, None]
        places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        near = torch.zeros_like(order, dtype=messages.dtype).scatter(
            -1, order, (places < kept).to(messages.dtype)
        )
        mixed = near @ finite_or_zero(messages) / near.sum(-1, keepdim=True)
        return self.rule.combine(mixed, weights, present)


@AGGREGATIONS.register("clipped-gossip")
@dataclass(frozen=True)
class ClippedGossip(Aggregation):
    """x_i + sum_j W_ij clip(x_j - x_i): a neighbour moves a node by at most W_ij radius (He et al. 2022).

    The "adaptive" radius is theirs, with those who are probably honest in place of the honest: without the
    ``attackers`` that are furthest, radius^2 = (1/delta) sum_j W_ij ||x_j - x_i||^2, where delta is the
    weight that so many neighbours can have. With no attackers, or a radius that is large enough, nothing is
    clipped, and it is plain gossip.
    """

    serves = frozenset({"graph", "changing graph", "warm start"})

    attackers: Whole = 0  # of a node's neighbours, for the adaptive radius
    radius: Positive | Literal["adaptive"] = "adaptive"  # how far a neighbour can be without being clipped

    @property
    def least(self) -> int:
        return self.attackers + 2

    def combine(self, messages: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        own = messages[:, :1]
        away = finite_or_zero(messages[:, 1:] - own)
        weights = weights[:, 1:].where(present[:, 1:], 0.0).to(messages.dtype)
        distance = away.norm(dim=-1)  # [m, k - 1]
        if self.radius != "adaptive":
            limit = torch.full_like(distance[:, :1], self.radius)
        elif self.attackers:
            limit = self._limit(distance, weights, present[:, 1:])
        else:
            limit = torch.full_like(distance[:, :1], torch.inf)
        clipped = distance > limit
        factors = weights * torch.where(clipped, limit / distance, 1.0)
        mixed: Tensor = messages[:, 0] + (factors.unsqueeze(-1) * away).sum(1)
        return mixed

    def _limit(self, distance: Tensor, weights: Tensor, present: Tensor) -> Tensor:
        """[m, 1]"""
        delta = weights.topk(self.attackers).values.sum(1)
        order = distance.where(present, torch.inf).argsort(1)
        honest = present.sum(1, keepdim=True) - self.attackers
        near = torch.arange(order.shape[1], device=order.device) < honest
        spread = (weights * distance.square()).gather(1, order).where(near, 0.0).sum(1)
        limit: Tensor = (spread / delta).sqrt().unsqueeze(1)
        return limit


def trimmed_mean(messages: Tensor, present: Tensor, left_out: Tensor) -> Tensor:
    """The mean of each coordinate of ``messages`` [m, k, d] without ``left_out`` [m] values at either end."""
    values = messages.where(present.unsqueeze(-1) & messages.isfinite(), torch.inf).sort(1).values
    place = torch.arange(messages.shape[1], device=messages.device)
    kept = (place >= left_out[:, None]) & (place < (present.sum(1) - left_out)[:, None])
    total = values.where(kept.unsqueeze(-1), 0.0).sum(1)
    return total / kept.sum(1, keepdim=True).to(messages.dtype)


def squared_distances(messages: Tensor, present: Tensor) -> Tensor:
    """[m, k, k]: between ``messages`` [m, k, d]; infinite to those that are not there, or not finite."""
    there = present & messages.isfinite().all(-1)
    squares = torch.cdist(messages, messages, compute_mode="donot_use_mm_for_euclid_dist").square()
    both = there.unsqueeze(1) & there.unsqueeze(2)
    same = torch.eye(messages.shape[1], dtype=torch.bool, device=messages.device)
    return squares.where(both, torch.inf).masked_fill(same, 0.0)


def finite_or_zero(numbers: Tensor) -> Tensor:
    """``numbers`` [..., d], but zeros for a vector in which one is not finite."""
    return numbers.where(numbers.isfinite().all(-1, keepdim=True), 0.0)
