"""Personalised methods: every node ends with a model of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from holdfast.algorithms.fedavg import Change, FedAvg
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Memory,
    ModelPart,
    Optimizer,
    Oracle,
    Part,
    Peers,
    found_part,
)
from holdfast.contract.parameters import Rate, least_dim
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, NonNegative
from holdfast.optimizers import PLAIN


class Client(NamedTuple):
    v: Tensor  # the client's personal model
    common: Memory  # the optimiser's, of the steps on the common model
    own: Memory  # and of those on the personal one


@ALGORITHMS.register("ditto", family="personalised", paper="Li et al. 2021, Alg. 1")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and beside it a personal model per client, pulled towards the common one (Li et al. 2021).

    Personal models tend to the minimisers of f_i(v) + (rho/2) ||v - x||^2, where x is FedAvg's model.
    """

    declared = Capabilities(needs_exact_sums=False, columnwise=True)

    rho: NonNegative = 0.1  # the paper's lambda: 0 is training alone, large values give the common model
    personal_steps: Count = 1
    personal_lr: Rate | None = None  # by default lr

    def init(self, x0: Tensor) -> Client:
        return Client(v=x0, common=self.optimizer.memory(x0), own=self.optimizer.memory(x0))

    def client(self, s: Client, received: Tensor, oracle: Oracle) -> tuple[Client, Tensor | Change]:
        common, change = super().client(s.common, received, oracle)
        lr = self.lr if self.personal_lr is None else self.personal_lr
        v, own = self.optimizer.descend(
            s.v, lambda v: oracle.grad(v) + self.rho * (v - received), lr, self.personal_steps, s.own
        )
        return Client(v, common, own), change

    def personal(self, s: Client) -> Tensor:
        return s.v


class Node(NamedTuple):
    x: Tensor  # the shared body's numbers and the node's own head
    body: Memory = ()  # the optimiser's, of the steps on the body
    head: Memory = ()


@ALGORITHMS.register("fedrep", family="personalised", paper="Collins et al. 2021, Alg. 1")
@dataclass(frozen=True)
class FedRep(Algorithm):
    """A shared body under a head of each node's own, trained in turn (Collins et al. 2021).

    Only the body is sent. ``head``: the name of a module or parameter, or several, or patterns of names; or a
    number, that of the last trainable numbers of the model.
    """

    declared = Capabilities(needs_exact_sums=False)

    lr: Rate
    head: Part
    head_steps: Count = 1  # tau: on the head, with the body as it was received
    local_steps: Count = 1  # then on the body, with the new head; more than one drifts
    optimizer: Optimizer = PLAIN  # of both, with separate memories

    @property
    def own(self) -> ModelPart:
        """The columns of the head."""
        return found_part(self.head)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, least_dim=least_dim(self.head))

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        if x0.shape[-1] < self.own.least_dim:
            raise HoldfastError(
                f"FedRep.head: should be less than the model's {x0.shape[-1]} trainable numbers, got "
                f"{self.own.size}; count those of its last layers, the others are the body"
            )
        body, head = self.own.split(x0)
        return Node(x=x0, body=self.optimizer.memory(body), head=self.optimizer.memory(head))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        own = self.own
        body, head = own.split(s.x)

        def head_gradient(head: Tensor) -> Tensor:
            return own.split(oracle.grad(own.join(body, head)))[1]

        def body_gradient(body: Tensor) -> Tensor:
            return own.split(oracle.grad(own.join(body, head)))[0]

        head, head_memory = self.optimizer.descend(head, head_gradient, self.lr, self.head_steps, s.head)
        moved, body_memory = self.optimizer.descend(body, body_gradient, self.lr, self.local_steps, s.body)
        shared = peers.exchange(moved).mixed
        return Node(x=own.join(shared, head), body=body_memory, head=head_memory)

    def model(self, s: Node) -> Tensor:
        return s.x

    def personal(self, s: Node) -> Tensor:
        return s.x


class Stays(NamedTuple):
    x: Tensor  # the shared numbers and those that stay at the node
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register("fedbn", family="personalised", paper="Li et al. 2021, Alg. 1")
@dataclass(frozen=True)
class FedBN(Algorithm):
    """Local steps and averaging, of all parameters but those that stay at the nodes (Li et al. 2021).

    ``local``: names of modules or parameters, or patterns such as "*.norm*", that are trained but never sent;
    or a number, that of the last trainable numbers of the model.
    """

    declared = Capabilities(needs_exact_sums=False)

    lr: Rate
    local: Part
    local_steps: Count = 1
    optimizer: Optimizer = PLAIN

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, least_dim=least_dim(self.local))

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Stays:
        if x0.shape[-1] < found_part(self.local).least_dim:
            raise HoldfastError(
                f"FedBN.local: the model has {x0.shape[-1]} trainable numbers, so none would be shared"
            )
        return Stays(x=x0, memory=self.optimizer.memory(x0))

    def round(self, s: Stays, oracle: Oracle, peers: Peers) -> Stays:
        own = found_part(self.local)
        moved, memory = self.optimizer.descend(s.x, oracle.grad, self.lr, self.local_steps, s.memory)
        shared, at_home = own.split(moved)
        return Stays(x=own.join(peers.exchange(shared).mixed, at_home), memory=memory)

    def model(self, s: Stays) -> Tensor:
        return s.x

    def personal(self, s: Stays) -> Tensor:
        return s.x
