"""Scaffnew (ProxSkip): corrected gradient steps until a shared coin calls for communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.averaging import descend_and_average
from holdfast.algorithms.diffusion import HALF, of_share
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Memory,
    Optimizer,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Probability, Share
from holdfast.optimizers import PLAIN


class Node(NamedTuple):
    x: Tensor  # the mixed model; with a server, the mean of all nodes
    h: Tensor  # tends to the node's own gradient at the optimum; sums to zero
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("scaffnew", family="primal-dual, with a server", paper="Mishchenko et al. 2022")
@dataclass(frozen=True)
class Scaffnew(Algorithm):
    """Rounds of random length, 1/p steps on average; fast with p = sqrt(mu/L) (Mishchenko et al. 2022)."""

    declared = Capabilities(topology="server", assumes_convex=True, columnwise=True)

    lr: Rate  # 1/L is safe
    p: Probability  # of communicating after a step; 1 makes it gradient descent
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, h=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        steps = 1
        while not peers.coin(self.p):
            steps += 1
        _, mean, excess, memory = descend_and_average(
            self.optimizer, s.x, lambda x: oracle.grad(x) - s.h, self.lr, steps, s.memory, oracle, peers
        )
        return Node(x=mean, h=s.h + self.p * steps * excess, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.h

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register(
    "d-scaffnew", family="corrected, between neighbours", paper="Mishchenko et al. 2022, Alg. 5"
)
@dataclass(frozen=True)
class DScaffnew(Algorithm):
    """Scaffnew between neighbours: rounds of random length, one vector per link, exact (Mishchenko 2022)."""

    declared = Capabilities(constant_graph=True, assumes_convex=True, columnwise=True)

    lr: Rate  # 1/L is safe
    p: Probability  # of communicating after a step; 1 makes it Exact Diffusion
    share: Share = HALF  # mixes with (1 - share) I + share W; more is faster where W allows it
    optimizer: Optimizer = PLAIN

    @property
    def capabilities(self) -> Capabilities:
        return of_share(self.declared, self.share)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, h=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        steps = 1
        while not peers.coin(self.p):
            steps += 1
        x, mixed, excess, memory = descend_and_average(
            self.optimizer, s.x, lambda x: oracle.grad(x) - s.h, self.lr, steps, s.memory, oracle, peers
        )
        h = s.h + self.p * steps * self.share * excess
        return Node(x=x + self.share * (mixed - x), h=h, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.h

    def model(self, s: Node) -> Tensor:
        return s.x
