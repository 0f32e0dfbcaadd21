"""DiLoCo and NoLoCo: many AdamW steps between exchanges, and momentum on what they achieved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.fedavg import FedAvg
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Memory,
    Optimizer,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate, Weight
from holdfast.core.validation import Count
from holdfast.optimizers import AdamW, Momentum
from holdfast.optimizers.momentum import Decay

INNER = AdamW(weight_decay=0.1, keep=True)
OUTER = Momentum(0.9, average=False, nesterov=True)


@ALGORITHMS.register("diloco", family="plain averaging", paper="Douillard et al. 2023, Alg. 1")
@dataclass(frozen=True)
class DiLoCo(FedAvg):
    """FedAvg with AdamW inside and Nesterov momentum outside, for language models (Douillard et al. 2023)."""

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    server_lr: Rate = 0.7
    optimizer: Optimizer = INNER
    server_optimizer: Optimizer = OUTER


class Node(NamedTuple):
    x: Tensor  # the slow model, which local steps start from
    velocity: Tensor  # of the slow model
    memory: Memory = ()  # the optimiser's


class Message(NamedTuple):
    x: Tensor
    change: Tensor  # how far the local steps went


@ALGORITHMS.register("noloco", family="plain averaging", paper="Kolehmainen et al. 2025")
@dataclass(frozen=True)
class NoLoCo(Algorithm):
    """DiLoCo without a server, slow models drawn together (Kolehmainen et al. 2025, authors' code)."""

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    lr: Rate
    local_steps: Count = 1
    momentum: Decay = 0.5  # the paper's alpha
    outer_lr: Rate = 0.7  # the paper's beta: weight of the neighbours' mean change
    pull: Weight = 0.7  # the paper's gamma, towards the neighbours' mean model; the code's is outer_lr
    optimizer: Optimizer = INNER

    @property
    def capabilities(self) -> Capabilities:
        # The velocity adds up what mixing changes, with a leak.
        return replace(self.declared, integrates_twice=self.pull if self.momentum else 0.0)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, velocity=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        fast, memory = self.optimizer.descend(s.x, oracle.grad, self.lr, self.local_steps, s.memory)
        mixed = peers.exchange(Message(x=s.x, change=fast - s.x)).mixed
        velocity = self.momentum * s.velocity + self.outer_lr * mixed.change - self.pull * (s.x - mixed.x)
        return Node(x=s.x + velocity, velocity=velocity, memory=memory)

    def model(self, s: Node) -> Tensor:
        return s.x
