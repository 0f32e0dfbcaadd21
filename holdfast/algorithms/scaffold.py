"""SCAFFOLD with a server and between neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.optimizers import PLAIN


class Client(NamedTuple):
    c: Tensor  # control variate; tends to the client's own gradient at the optimum
    memory: Memory = ()  # the optimiser's


class Server(NamedTuple):
    x: Tensor
    c: Tensor  # always the mean of all clients' control variates


class Update(NamedTuple):
    x: Tensor
    c: Tensor


@ALGORITHMS.register("scaffold", family="corrected, with a server", paper="Karimireddy et al. 2020")
@dataclass(frozen=True)
class SCAFFOLD(ServerAlgorithm[Server]):
    """Control variates cancel each client's bias (Karimireddy et al. 2020)."""

    declared = Capabilities(
        compensates=frozenset({"c"}),  # what is left out stays in g - c
        unequal_steps=True,
        late_clients=True,
        columnwise=True,
    )

    lr: Rate
    local_steps: LocalSteps = 1
    server_lr: Rate = 1.0
    option: Literal[1, 2] = 2  # new control variate: 1 full gradient at x, 2 mean gradient of the steps
    optimizer: Optimizer = PLAIN

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.declared, sends_gradients=self.option == 1)

    def init(self, x0: Tensor) -> Client:
        return Client(c=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, c=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        return server

    def client(self, s: Client, received: Server, oracle: Oracle) -> tuple[Client, Update]:
        x, correction = received.x, received.c - s.c
        y, mean, memory = self.optimizer.descend_and_track(
            x, lambda y: oracle.grad(y) + correction, self.lr, oracle.steps(self.local_steps), s.memory
        )
        c = oracle.full_grad(x) if self.option == 1 else mean - correction
        return s._replace(memory=memory), Update(x=y - x, c=c - s.c)

    def server(self, server: Server, mean: Update, share: float) -> Server:
        # Clients outside the cohort keep their control variates: (1/n) times the cohort's sum, not its mean.
        return Server(x=server.x + self.server_lr * mean.x, c=server.c + share * mean.c)

    def finish(self, s: Client, sent: Update, answer: tuple[()], oracle: Oracle) -> Client:
        return s._replace(c=s.c + sent.c)

    def dual(self, s: Client) -> Tensor:
        return s.c

    def model(self, server: Server) -> Tensor:
        return server.x


class Node(NamedTuple):
    x: Tensor  # neighbours' weighted average of the models
    c: Tensor  # the node's control variate
    c_mean: Tensor  # its estimate of the mean control variate
    memory: Memory = ()  # the optimiser's


@ALGORITHMS.register(
    "d-scaffold",
    family="corrected, between neighbours",
    paper="baseline of Tyou et al. 2024 (reconstruction)",
)
@dataclass(frozen=True)
class DSCAFFOLD(Algorithm):
    """SCAFFOLD between neighbours: every node tracks the mean control variate by gossip (reconstruction)."""

    declared = Capabilities(unequal_steps=True, columnwise=True)

    lr: Rate
    local_steps: LocalSteps = 1
    naive: bool = False  # mix the control variates themselves: same traffic, biased on sparse graphs
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        zero = torch.zeros_like(x0)
        return Node(x=x0, c=zero, c_mean=zero, memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        correction = s.c_mean - s.c
        y, mean, memory = self.optimizer.descend_and_track(
            s.x, lambda y: oracle.grad(y) + correction, self.lr, oracle.steps(self.local_steps), s.memory
        )
        c = mean - correction
        mixed = peers.exchange(Update(x=y, c=c if self.naive else s.c_mean + c - s.c)).mixed
        return Node(x=mixed.x, c=c, c_mean=mixed.c, memory=memory)

    def dual(self, s: Node) -> Tensor:
        return s.c - s.c_mean

    def model(self, s: Node) -> Tensor:
        return s.x
