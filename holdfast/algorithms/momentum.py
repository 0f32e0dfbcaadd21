"""Gossip with momentum, which is never exchanged: PD-SGDM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from holdfast.contract import ALGORITHMS, Algorithm, Oracle, Peers
from holdfast.contract.schedules import Rate
from holdfast.core.validation import Count


class Node(NamedTuple):
    x: Tensor
    m: Tensor  # the node's own decaying sum of gradients, kept from round to round


@ALGORITHMS.register("pd-sgdm", family="plain averaging", paper="Gao and Huang 2020")
@dataclass(frozen=True)
class PDSGDM(Algorithm):
    """Local SGD steps with momentum, then averaging with neighbours; biased (Gao and Huang 2020)."""

    columnwise: ClassVar[bool] = True

    lr: Rate
    local_steps: Count = 1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # 0 is gossip

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, m=torch.zeros_like(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        x, m = s
        for _ in range(self.local_steps):
            m = self.momentum * m + oracle.grad(x)
            x = x - self.lr * m
        return Node(x=peers.exchange(x).mixed, m=m)

    def model(self, s: Node) -> Tensor:
        return s.x
