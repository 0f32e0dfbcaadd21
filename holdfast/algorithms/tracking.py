"""Gradient tracking: every node carries an estimate of the network's mean gradient and steps along it."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from holdfast.core.validation import Count, Whole
from holdfast.optimizers import PLAIN


class Node(NamedTuple):
    x: Tensor  # the node's own model
    y: Tensor  # tracker: its mean over the network is the mean of g, always
    g: Tensor  # the gradient that the tracker last took in
    memory: Memory = ()  # the optimiser's


class Message(NamedTuple):
    x: Tensor
    y: Tensor


def move(x: Tensor, y: Tensor, g: Tensor, oracle: Oracle) -> Node:
    """Goes to ``x`` and lets the tracker ``y``, which has taken in ``g``, follow the gradient there."""
    new = oracle.grad(x)
    return Node(x=x, y=y + new - g, g=new)


def combine_then_adapt(s: Node, oracle: Oracle, peers: Peers, step: Tensor) -> Node:
    """One step of gradient tracking: mixed model, but a step along the tracker as it was before mixing."""
    mixed = peers.exchange(Message(x=s.x, y=s.y)).mixed
    return move(mixed.x - step, mixed.y, s.g, oracle)


@dataclass(frozen=True)
class Tracking(Algorithm):
    """What the methods with a tracker have in common: they start it at the first gradient."""

    declared = Capabilities(
        sends_gradients=True,  # the first message is the first gradient
    )

    lr: Rate
    optimizer: Optimizer = field(default=PLAIN, kw_only=True)  # sees the tracker as its gradient

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        g = oracle.grad(x0)
        return Node(x=x0, y=g, g=g, memory=self.optimizer.memory(x0))

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("gt-sgd", family="corrected, between neighbours", paper="Xin et al. 2021")
@dataclass(frozen=True)
class GTSGD(Tracking):
    """Gradient tracking: one step along the tracked mean gradient per round, exact (Xin et al. 2021)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    order: Literal["cta", "atc"] = "cta"  # combine-then-adapt, or adapt-then-combine with two exchanges

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        direction, memory = self.optimizer.single(s.y, s.memory, s.x)
        step = self.lr * direction
        if self.order == "cta":
            return combine_then_adapt(s, oracle, peers, step)._replace(memory=memory)
        adapted = move(peers.exchange(s.x - step).mixed, s.y, s.g, oracle)
        return adapted._replace(y=peers.exchange(adapted.y).mixed, memory=memory)


@ALGORITHMS.register(
    "net-fleet", family="corrected, between neighbours", paper="Zhang et al. 2022, Alg. 1 (NET-FLEET)"
)
@dataclass(frozen=True)
class NETFLEET(Tracking):
    """Local steps along a tracker that is corrected recursively, exact (Zhang et al. 2022, Alg. 1)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    local_steps: Count = 1  # K, of which the first follows the exchange; 1 is gradient tracking

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        direction, memory = self.optimizer.update(s.y, self.optimizer.begin(s.memory, s.x), s.x)
        s = combine_then_adapt(s, oracle, peers, self.lr * direction)  # lines 4-7
        for _ in range(self.local_steps - 1):
            direction, memory = self.optimizer.update(s.y, memory, s.x)
            s = move(s.x - self.lr * direction, s.y, s.g, oracle)  # lines 9-11
        return s._replace(memory=self.optimizer.kept(memory))


@ALGORITHMS.register(
    "flexgt", family="corrected, between neighbours", paper="Huang and Xu 2023 (reconstruction)"
)
@dataclass(frozen=True)
class FlexGT(Tracking):
    """Gradient tracking with several local steps and several exchanges a round, exact (Huang and Xu 2023)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    local_steps: Count = 1  # steps along the tracker, which follows each new gradient
    exchanges: Count = 1  # M: of the model, then of the tracker; each mixes with W^M

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        memory = self.optimizer.begin(s.memory, s.x)
        for _ in range(self.local_steps - 1):
            direction, memory = self.optimizer.update(s.y, memory, s.x)
            s = move(s.x - self.lr * direction, s.y, s.g, oracle)
        direction, memory = self.optimizer.update(s.y, memory, s.x)
        s = move(self._mix(s.x - self.lr * direction, peers), s.y, s.g, oracle)
        return s._replace(y=self._mix(s.y, peers), memory=self.optimizer.kept(memory))

    def _mix(self, own: Tensor, peers: Peers) -> Tensor:
        for _ in range(self.exchanges):
            own = peers.exchange(own).mixed
        return own


@ALGORITHMS.register("dsgt", family="corrected, between neighbours", paper="Lu et al. 2020 (reconstruction)")
@dataclass(frozen=True)
class DSGT(Tracking):
    """Reconstruction: plain local SGD steps, then one of gradient tracking; biased (Lu et al. 2020)."""

    declared = Capabilities(sends_gradients=True, columnwise=True)

    local_steps: Whole = 1  # K plain steps before the tracking step; 0 is gradient tracking
    optimizer: Optimizer = PLAIN  # of the plain steps

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        x, memory = self.optimizer.descend(s.x, oracle.grad, self.lr, self.local_steps, s.memory)
        # g stays the gradient at the last tracking point, so that the trackers keep their mean.
        return combine_then_adapt(s._replace(x=x), oracle, peers, self.lr * s.y)._replace(memory=memory)


class Corrected(NamedTuple):
    x: Tensor  # neighbours' weighted average of the models
    c: Tensor  # correction; tends to minus the node's own gradient at the optimum, sums to zero
    memory: Memory = ()  # the optimiser's


class Progress(NamedTuple):
    x: Tensor
    z: Tensor  # mean corrected gradient of the round


@ALGORITHMS.register("k-gt", family="corrected, between neighbours", paper="Liu et al. 2023")
@dataclass(frozen=True)
class KGT(Algorithm):
    """Local steps with a correction that tracks the round's mean gradient, exact (Liu et al. 2023)."""

    declared = Capabilities(unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    server_lr: Rate = 1.0  # share of the local progress that is kept; 1 makes it decentralised SCAFFOLD
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Corrected:
        return Corrected(x=x0, c=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Corrected, oracle: Oracle, peers: Peers) -> Corrected:
        y, z, memory = self.optimizer.descend_and_track(
            s.x, lambda y: oracle.grad(y) + s.c, self.lr, oracle.steps(self.local_steps), s.memory
        )
        mixed = peers.exchange(Progress(x=s.x + self.server_lr * (y - s.x), z=z)).mixed
        return Corrected(x=mixed.x, c=s.c - z + mixed.z, memory=memory)

    def model(self, s: Corrected) -> Tensor:
        return s.x
