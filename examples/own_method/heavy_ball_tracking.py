"""A method of one's own: gradient tracking with heavy-ball momentum on the tracked direction.

m <- beta m + y                                  momentum on the tracker
x <- mix(x - eta m)
y <- mix(y) + g(x) - g(previous x)               the mean of y is the mean gradient, always
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import holdfast as hf


class Node(NamedTuple):
    x: Tensor
    y: Tensor  # tracks the mean gradient
    g: Tensor  # the last own gradient
    m: Tensor


@hf.ALGORITHMS.register("heavy-ball-tracking")
@dataclass(frozen=True)
class HeavyBallTracking(hf.Algorithm):
    """Gradient tracking with heavy-ball momentum; with beta = 0 it is GT-SGD, adapt then combine."""

    lr: hf.Rate
    beta: hf.NonNegative = 0.5

    def init(self, x0: Tensor, oracle: hf.Oracle, peers: hf.Peers) -> Node:
        g = oracle.grad(x0)
        return Node(x=x0, y=g, g=g, m=torch.zeros_like(x0))

    def round(self, s: Node, oracle: hf.Oracle, peers: hf.Peers) -> Node:
        m = self.beta * s.m + s.y
        x = peers.exchange(s.x - self.lr * m).mixed
        g = oracle.grad(x)
        y = peers.exchange(s.y + g - s.g).mixed
        return Node(x=x, y=y, g=g, m=m)

    def model(self, s: Node) -> Tensor:
        return s.x
