"""Averaging with neighbours without any correction: all of these are biased on heterogeneous data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

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
from holdfast.optimizers import PLAIN, Momentum
from holdfast.optimizers.momentum import Decay


class Node(NamedTuple):
    x: Tensor
    memory: Memory = ()  # the optimiser's, never exchanged


@ALGORITHMS.register("dsgd", family="plain averaging", paper="Lian et al. 2017")
@dataclass(frozen=True)
class DSGD(Algorithm):
    """One gradient step and one mixing per round, DGD with stochastic gradients (Lian et al. 2017)."""

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    lr: Rate
    order: Literal["cta", "atc"] = "cta"  # combine-then-adapt, or adapt-then-combine
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        direction, memory = self.optimizer.single(oracle.grad(s.x), s.memory, s.x)
        step = self.lr * direction
        mixed = peers.exchange(s.x if self.order == "cta" else s.x - step).mixed
        return Node(x=mixed - step if self.order == "cta" else mixed, memory=memory)

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("gossip", family="plain averaging", paper="Li et al. 2019 (LD-SGD)")
@dataclass(frozen=True)
class Gossip(Algorithm):
    """Local SGD steps, then averaging with neighbours; also known as LD-SGD."""

    declared = Capabilities(needs_exact_sums=False, unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        steps = oracle.steps(self.local_steps)
        x, memory = self.optimizer.descend(s.x, oracle.grad, self.lr, steps, s.memory)
        return Node(x=peers.exchange(x).mixed, memory=memory)

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("pd-sgdm", family="plain averaging", paper="Gao and Huang 2020")
@dataclass(frozen=True)
class PDSGDM(Gossip):
    """Gossip whose nodes keep their own momentum from round to round; biased (Gao and Huang 2020)."""

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    optimizer: Optimizer = field(init=False)
    momentum: Decay = 0.9  # 0 is gossip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "optimizer", Momentum(self.momentum, average=False, keep=True))


class Moving(NamedTuple):
    x: Tensor
    m: Tensor  # momentum, learned from how the mixed model moves


@ALGORITHMS.register("qg-dsgdm", family="plain averaging", paper="Lin et al. 2021, Alg. 1")
@dataclass(frozen=True)
class QGDSGDM(Algorithm):
    """DSGD with quasi-global momentum: that of the mixed model, not of own gradients (Lin et al. 2021)."""

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    lr: Rate
    momentum: Decay = 0.9  # weight of m in a step, and of the old m in the new one; 0 is DSGD

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, integrates_twice=self.momentum)  # m takes in what mixing changes

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Moving:
        return Moving(x=x0, m=torch.zeros_like(x0))

    def round(self, s: Moving, oracle: Oracle, peers: Peers) -> Moving:
        step = self.lr * (self.momentum * s.m + oracle.grad(s.x))
        x = peers.exchange(s.x - step).mixed
        m = self.momentum * s.m + (1 - self.momentum) * (s.x - x) / self.lr
        return Moving(x=x, m=m)

    def model(self, s: Moving) -> Tensor:
        return s.x
