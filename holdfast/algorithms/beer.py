"""BEER and MoTEF: gradient tracking whose messages may be compressed.

Both papers send C(X - H), where H is a copy of X that all nodes add up. Here the channel does that
(``PublicCopies``), and its gamma is the papers' gamma: ``exchange`` returns x + gamma (W - I) H. Without a
channel H is X itself. The papers mix with the copies of the round before, so a node keeps what mixing adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Share


class Node(NamedTuple):
    x: Tensor  # the node's own model
    x_pull: Tensor  # gamma (W - I) H: what mixing will add to it
    v: Tensor  # tracker: its mean over the network is the mean of m, always
    v_pull: Tensor  # gamma (W - I) G, the same for the tracker
    m: Tensor  # the node's estimate of its own gradient, which the tracker has taken in


@dataclass(frozen=True)
class _CompressedTracking(Algorithm):
    """What both do in a round; they differ in how m follows the gradients."""

    declared = Capabilities(
        sends_gradients=True,  # the first tracker is the first gradient
    )

    lr: Rate

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        g, zero = oracle.grad(x0), torch.zeros_like(x0)  # H = G = 0
        return Node(x=x0, x_pull=zero, v=g, v_pull=zero, m=g)

    def _round(self, s: Node, oracle: Oracle, peers: Peers, share: float) -> Node:
        x = s.x + s.x_pull - self.lr * s.v
        x_pull = peers.exchange(x).mixed - x
        m = (1 - share) * s.m + share * oracle.grad(x)
        v = s.v + s.v_pull + m - s.m
        return Node(x=x, x_pull=x_pull, v=v, v_pull=peers.exchange(v).mixed - v, m=m)

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("beer", family="corrected, between neighbours", paper="Zhao et al. 2022, Alg. 1")
@dataclass(frozen=True)
class BEER(_CompressedTracking):
    """Gradient tracking made for compressed messages, exact (Zhao et al. 2022, Alg. 1)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        return self._round(s, oracle, peers, 1.0)


@ALGORITHMS.register("motef", family="corrected, between neighbours", paper="Islamov et al. 2024")
@dataclass(frozen=True)
class MoTEF(_CompressedTracking):
    """BEER that tracks an average of past gradients, for noisy ones, exact (Islamov et al. 2024)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    share: Share = 0.1  # lambda: weight of the new gradient in the average; 1 makes it BEER

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        return self._round(s, oracle, peers, self.share)
