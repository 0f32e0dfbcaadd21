"""A channel with memory, and a wire of two number types: error feedback around rounding to a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.channel import CHANNELS, Channel, Draw
from holdfast.core.tree import tree_map

LEVELS = 127


class Points(NamedTuple):
    """Numbers as multiples of a width."""

    counts: Tensor  # [m, d], int8
    width: Tensor  # [m, 1]


@CHANNELS.register("grid")
@dataclass(frozen=True)
class Grid(Channel):
    """Sends how far the message is from what others know of it, in steps of a width; maybe dithered."""

    serves = frozenset({"graph", "server", "cohort", "warm start"})

    gamma: float = 0.5
    dithered: bool = False

    def init(self, message: Any) -> Any:
        return tree_map(torch.zeros_like, message)  # what others know

    init_receiver = init  # of a node, what it knows: sum_j W_ij h_j; of a server, the mean

    def encode(self, message: Any, state: Any, draw: Draw) -> Any:
        def points(m: Tensor, known: Tensor) -> Points:
            rest = m - known
            width = rest.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LEVELS
            shift = draw.uniform(m.shape[-1]).to(m) if self.dithered else 0.5
            return Points((rest / width + shift).floor().to(torch.int8), width)

        return tree_map(points, message, state)

    def decode(self, wire: Any, like: Any) -> Any:
        return tree_map(lambda t, points: points.counts.to(t.dtype) * points.width, like, wire)

    def update(self, message: Any, own: Any, state: Any) -> Any:
        return tree_map(torch.add, state, own)

    def combine(self, message: Any, own: Any, mixed: Any, sender: Any, receiver: Any) -> tuple[Any, Any]:
        known = tree_map(torch.add, receiver, mixed)
        return tree_map(lambda m, h, s: m + self.gamma * (s - h), message, sender, known), known

    def average(self, message: Any, own: Any, mean: Any, sender: Any, receiver: Any) -> tuple[Any, Any]:
        known = tree_map(torch.add, receiver, mean)
        return known, known

    def gather(self, mean: Any, receiver: Any, share: float) -> tuple[Any, Any]:
        return tree_map(torch.add, receiver, mean), tree_map(lambda h, q: h + share * q, receiver, mean)
