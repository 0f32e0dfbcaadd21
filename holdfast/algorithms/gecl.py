"""G-ECL and Local G-ECL: a dual variable per node remembers its bias (Tyou et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.averaging import descend_and_average
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Gradient,
    Inbox,
    LocalOptimizer,
    LocalSteps,
    Memory,
    Optimizer,
    Oracle,
    Peers,
    most_steps,
)
from holdfast.contract.parameters import Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import NonNegative, Whole
from holdfast.optimizers import PLAIN


class Node(NamedTuple):
    x: Tensor  # the node's own model after its local steps
    mixed: Tensor  # neighbours' weighted average of the models
    dual: Tensor  # tends to the node's own gradient at the optimum; sums to zero over the network
    memory: Memory = ()  # the optimiser's


class Message(NamedTuple):
    x: Tensor
    v: Tensor  # mean corrected gradient of the round


def corrected_gradient(s: Node, oracle: Oracle, first_grad_at: str) -> Gradient:
    """The gradient minus the dual, for steps from the mixed model; the first may be that of the own model."""
    first, dual = iter([s.x] if first_grad_at == "local" else []), s.dual
    return lambda x: oracle.grad(next(first, x)) - dual


def model_differences(mixed: Tensor, inbox: Inbox[Message], peers: Peers, step: float) -> Tensor:
    """sum_j (mixed_j - mixed_i) over neighbours j, of the models before the exchange.

    They need no message of their own: mixed_j = x_j + step v_j, where step = K lr.
    """
    others = inbox.neighbour_sum
    return others.x + step * others.v - peers.degree * mixed


def check_alpha(method: Algorithm, alpha: float, optimizer: LocalOptimizer) -> None:
    """Refuses the term of the model differences where messages do not tell them."""
    if alpha and not optimizer.plain:
        raise HoldfastError(
            f"{type(method).__name__}.alpha: only after plain SGD steps do messages tell how far neighbours "
            "went; leave out either alpha or the optimizer"
        )


@ALGORITHMS.register(
    "gecl", family="corrected, between neighbours", paper="Takezawa et al. 2022; Tyou et al. 2024, eq. 6"
)
@dataclass(frozen=True)
class GECL(Algorithm):
    """One dual-corrected gradient step per exchange, a form of gradient tracking (Local G-ECL, eq. 6)."""

    declared = Capabilities(columnwise=True)

    lr: Rate
    alpha: NonNegative = 0.0  # weight of the neighbours' model differences in the dual, equal on all links
    optimizer: Optimizer = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self, self.alpha, self.optimizer)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, mixed=x0, dual=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        v = oracle.grad(s.x) - s.dual
        direction, memory = self.optimizer.single(v, s.memory, s.mixed)
        x = s.mixed - self.lr * direction
        inbox = peers.exchange(Message(x=x, v=v))
        dual = s.dual + v - inbox.mixed.v
        if self.alpha:
            dual = dual + self.alpha / 2 * model_differences(s.mixed, inbox, peers, self.lr)
        return Node(x=x, mixed=inbox.mixed.x, dual=dual, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.dual

    def model(self, s: Node) -> Tensor:
        return s.mixed


@ALGORITHMS.register(
    "local-gecl", family="corrected, between neighbours", paper="Tyou et al. 2024, Alg. 1 (reconstruction)"
)
@dataclass(frozen=True)
class LocalGECL(Algorithm):
    """Local steps corrected by a dual variable, exact on any connected graph (Local G-ECL, Alg. 1)."""

    declared = Capabilities(unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    first_grad_at: Literal["local", "mixed"] = "local"  # "mixed" makes it decentralised SCAFFOLD
    alpha: NonNegative = 0.0  # weight of the neighbours' model differences in the dual, equal on all links
    warm_start_rounds: Whole = 0  # gossip rounds on the initial gradients; 0 starts the duals at zero
    optimizer: Optimizer = PLAIN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self, self.alpha, self.optimizer)

    @property
    def capabilities(self) -> Capabilities:
        why = "messages do not tell how far neighbours went, which alpha needs" if self.alpha else ""
        return replace(self.declared.with_equal_steps(why), sends_gradients=self.warm_start_rounds > 0)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        dual = torch.zeros_like(x0)
        if self.warm_start_rounds:
            gradient = average = oracle.full_grad(x0)
            for _ in range(self.warm_start_rounds):
                average = peers.exchange(average).mixed
            dual = gradient - average
        return Node(x=x0, mixed=x0, dual=dual, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        gradient = corrected_gradient(s, oracle, self.first_grad_at)
        start, dual, memory = s.mixed, s.dual, s.memory
        del s  # a model may be large: each is let go after its last use
        x, v, memory = self.optimizer.descend_and_track(
            start, gradient, self.lr, oracle.steps(self.local_steps), memory
        )
        dual = dual + v
        mixed = start if self.alpha else None
        del gradient, start
        inbox = peers.exchange(Message(x=x, v=v))
        del v
        dual = dual - inbox.mixed.v
        if mixed is not None:
            step = most_steps(self.local_steps) * self.lr  # the same for all nodes: see ``capabilities``
            dual = dual + self.alpha / 2 * model_differences(mixed, inbox, peers, step)
        return Node(x=x, mixed=inbox.mixed.x, dual=dual, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.dual

    def model(self, s: Node) -> Tensor:
        return s.mixed


@ALGORITHMS.register("local-gecl-server", family="corrected, with a server", paper="Tyou et al. 2024, Alg. 2")
@dataclass(frozen=True)
class LocalGECLServer(Algorithm):
    """Local G-ECL with a server: the same iterates as on a complete graph for half the traffic (Alg. 2)."""

    declared = Capabilities(topology="server", unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    first_grad_at: Literal["local", "mixed"] = "local"  # "mixed" makes it SCAFFOLD
    warm_start: bool = False  # start the duals at the initial gradients' deviation from their mean
    optimizer: Optimizer = PLAIN

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, sends_gradients=self.warm_start)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        dual = torch.zeros_like(x0)
        if self.warm_start:
            gradient = oracle.full_grad(x0)
            dual = gradient - peers.exchange(gradient).mixed
        return Node(x=x0, mixed=x0, dual=dual, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        gradient = corrected_gradient(s, oracle, self.first_grad_at)
        x, mean, excess, memory = descend_and_average(
            self.optimizer, s.mixed, gradient, self.lr, self.local_steps, s.memory, oracle, peers
        )
        return Node(x=x, mixed=mean, dual=s.dual + excess, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.dual

    def model(self, s: Node) -> Tensor:
        return s.mixed
