"""Corrected local steps behind a server that holds no state of its own: VRL-SGD and FedLin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.averaging import descend_and_average
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    LocalSteps,
    Memory,
    Optimizer,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.optimizers import PLAIN


class Node(NamedTuple):
    x: Tensor  # the mean model of all nodes
    delta: Tensor  # the node's mean gradient minus that of all nodes; sums to zero
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("vrl-sgd", family="corrected, with a server", paper="Liang et al. 2019")
@dataclass(frozen=True)
class VRLSGD(Algorithm):
    """SCAFFOLD's iterates for half its traffic: each node keeps only its deviation (Liang et al. 2019)."""

    declared = Capabilities(topology="server", unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, delta=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        _, mean, excess, memory = descend_and_average(
            self.optimizer,
            s.x,
            lambda y: oracle.grad(y) - s.delta,
            self.lr,
            self.local_steps,
            s.memory,
            oracle,
            peers,
        )
        return Node(x=mean, delta=s.delta + excess, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.delta

    def model(self, s: Node) -> Tensor:
        return s.x


class Model(NamedTuple):
    x: Tensor  # the mean model of all nodes
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("fedlin", family="corrected, with a server", paper="Mitra et al. 2021")
@dataclass(frozen=True)
class FedLin(Algorithm):
    """Local steps corrected by fresh full gradients, for two round trips per round (Mitra et al. 2021)."""

    declared = Capabilities(topology="server", sends_gradients=True, unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Model:
        return Model(x=x0, memory=self.optimizer.memory(x0))

    def round(self, s: Model, oracle: Oracle, peers: Peers) -> Model:
        own = oracle.full_grad(s.x)
        correction = peers.exchange(own).mixed - own
        y, memory = self.optimizer.descend(
            s.x, lambda y: oracle.grad(y) + correction, self.lr, oracle.steps(self.local_steps), s.memory
        )
        return Model(x=peers.exchange(y).mixed, memory=memory)

    def model(self, s: Model) -> Tensor:
        return s.x
