"""Exact Diffusion and its relatives: exact on any graph, with one vector over every link.

The methods of gradient tracking send a model and a correction. These learn the correction from the models
alone: what mixing changed in a node's model is what the node's own gradients had pulled away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from holdfast.core.validation import NonNegative, Share
from holdfast.optimizers import PLAIN

HALF = 0.5


def mix(own: Tensor, peers: Peers, share: float) -> Tensor:
    """((1 - share) I + share W) own."""
    return own + share * (peers.exchange(own).mixed - own)


def least_eigenvalue(share: float) -> float:
    """What no eigenvalue of W may lie below.

    An eigenvalue λ of (1 - share) I + share W gives t² - 2λt + λ = 0 without gradients: |t| > 1 if λ < -1/3.
    """
    return max(-1.0, 1 - 4 / (3 * share))


def of_share(declared: Capabilities, share: float) -> Capabilities:
    """``declared``, and what follows from mixing with (1 - share) I + share W."""
    return replace(declared, least_eigenvalue=least_eigenvalue(share), integrates_twice=share)


class Node(NamedTuple):
    x: Tensor  # the node's own model
    last: Tensor  # the model of the round before
    g: Tensor  # its gradient there


@dataclass(frozen=True)
class Differences(Algorithm):
    """What the methods with one step per round have in common: a state of models and gradients."""

    declared = Capabilities(constant_graph=True, integrates_twice=HALF)

    lr: Rate

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, last=x0, g=torch.zeros_like(x0))  # the first round is a plain step

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register(
    "exact-diffusion", family="corrected, between neighbours", paper="Yuan et al. 2019; D²: Tang et al. 2018"
)
@dataclass(frozen=True)
class ExactDiffusion(Differences):
    """One step per round, exact with one vector per link (Yuan et al. 2019; D², Tang et al. 2018)."""

    declared = Capabilities(constant_graph=True, columnwise=True)

    share: Share = HALF  # mixes with (1 - share) I + share W; 1 is D²; more is faster where W allows it

    @property
    def capabilities(self) -> Capabilities:
        return of_share(self.declared, self.share)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        g = oracle.grad(s.x)
        x = mix(2 * s.x - s.last - self.lr * (g - s.g), peers, self.share)
        return Node(x=x, last=s.x, g=g)


@ALGORITHMS.register("extra", family="corrected, between neighbours", paper="Shi et al. 2015")
@dataclass(frozen=True)
class EXTRA(Differences):
    """One step per round, exact with one vector per link, gradients unmixed (Shi et al. 2015)."""

    declared = Capabilities(constant_graph=True, integrates_twice=HALF, columnwise=True)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        g = oracle.grad(s.x)
        x = mix(2 * s.x - s.last, peers, HALF) - self.lr * (g - s.g)
        return Node(x=x, last=s.x, g=g)


class Composite(NamedTuple):
    x: Tensor  # the node's own model, sparse with l1
    z: Tensor  # the same before the proximal step
    last: Tensor  # the model of the round before
    g: Tensor  # its gradient there


@ALGORITHMS.register("nids", family="corrected, between neighbours", paper="Li, Shi and Yan 2019")
@dataclass(frozen=True)
class NIDS(Algorithm):
    """Exact Diffusion with a proximal step, for f + l1 ‖x‖₁ over any graph (Li, Shi and Yan 2019)."""

    declared = Capabilities(constant_graph=True, integrates_twice=HALF, columnwise=True)

    lr: Rate  # up to 2/L on any graph
    l1: NonNegative = 0.0  # weight of ‖x‖₁, common to all nodes; 0 makes it Exact Diffusion

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Composite:
        return Composite(x=x0, z=x0, last=x0, g=torch.zeros_like(x0))

    def round(self, s: Composite, oracle: Oracle, peers: Peers) -> Composite:
        g = oracle.grad(s.x)
        z = s.z - s.x + mix(2 * s.x - s.last - self.lr * (g - s.g), peers, HALF)
        x = torch.sign(z) * torch.clamp(z.abs() - self.lr * self.l1, min=0)  # prox of lr l1 ‖·‖₁
        return Composite(x=x, z=z, last=s.x, g=g)

    def model(self, s: Composite) -> Tensor:
        return s.x


class Local(NamedTuple):
    x: Tensor  # the node's own model
    dual: Tensor  # tends to the node's own gradient at the optimum; sums to zero over the network
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("led", family="corrected, between neighbours", paper="Alghunaim 2023, Alg. 1")
@dataclass(frozen=True)
class LED(Algorithm):
    """Local Exact-Diffusion: local steps, exact with one vector per link (Alghunaim 2023, Alg. 1)."""

    declared = Capabilities(constant_graph=True, unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1  # 1 is Exact Diffusion
    share: Share = HALF  # mixes with (1 - share) I + share W; more is faster where W allows it
    optimizer: Optimizer = PLAIN

    @property
    def capabilities(self) -> Capabilities:
        return of_share(self.declared, self.share)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Local:
        return Local(x=x0, dual=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Local, oracle: Oracle, peers: Peers) -> Local:
        x, mixed, excess, memory = descend_and_average(
            self.optimizer,
            s.x,
            lambda x: oracle.grad(x) - s.dual,
            self.lr,
            self.local_steps,
            s.memory,
            oracle,
            peers,
        )
        return Local(x=x + self.share * (mixed - x), dual=s.dual + self.share * excess, memory=memory)

    def dual(self, s: Local) -> Tensor:
        return s.dual

    def model(self, s: Local) -> Tensor:
        return s.x
