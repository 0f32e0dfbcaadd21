"""Averaging with neighbours without any correction: DSGD and Gossip. Both are biased on unlike data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from holdfast.contract import ALGORITHMS, Algorithm, Oracle, Peers
from holdfast.contract.schedules import Rate
from holdfast.core.validation import Count


class Node(NamedTuple):
    x: Tensor


@ALGORITHMS.register("dsgd", family="plain averaging", paper="Lian et al. 2017")
@dataclass(frozen=True)
class DSGD(Algorithm):
    """One gradient step and one mixing per round, DGD with stochastic gradients (Lian et al. 2017)."""

    columnwise: ClassVar[bool] = True

    lr: Rate
    order: Literal["cta", "atc"] = "cta"  # combine-then-adapt, or adapt-then-combine

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        step = self.lr * oracle.grad(s.x)
        if self.order == "cta":
            return Node(x=peers.exchange(s.x).mixed - step)
        return Node(x=peers.exchange(s.x - step).mixed)

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("gossip", family="plain averaging", paper="Local G-ECL, NET-FLEET (as LD-SGD)")
@dataclass(frozen=True)
class Gossip(Algorithm):
    """Local SGD steps, then averaging with neighbours; also known as LD-SGD."""

    columnwise: ClassVar[bool] = True

    lr: Rate
    local_steps: Count = 1

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        x = s.x
        for _ in range(self.local_steps):
            x = x - self.lr * oracle.grad(x)
        return Node(x=peers.exchange(x).mixed)

    def model(self, s: Node) -> Tensor:
        return s.x
