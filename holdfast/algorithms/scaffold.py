"""SCAFFOLD with a server and between neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.contract import ALGORITHMS, Algorithm, Oracle, Peers, ServerAlgorithm
from holdfast.contract.schedules import Rate
from holdfast.core.validation import Count


class Client(NamedTuple):
    c: Tensor  # control variate; tends to the client's own gradient at the optimum


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

    columnwise: ClassVar[bool] = True

    lr: Rate
    local_steps: Count = 1
    server_lr: Rate = 1.0
    option: Literal[1, 2] = 2  # new control variate: 1 full gradient at the server's model, 2 steps' mean

    def init(self, x0: Tensor) -> Client:
        return Client(c=torch.zeros_like(x0))

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, c=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        return server

    def client(self, s: Client, received: Server, oracle: Oracle) -> tuple[Client, Update]:
        x, c = received
        y = x
        for _ in range(self.local_steps):
            y = y - self.lr * (oracle.grad(y) - s.c + c)
        c_new = oracle.full_grad(x) if self.option == 1 else s.c - c + (x - y) / (self.local_steps * self.lr)
        return Client(c=c_new), Update(x=y - x, c=c_new - s.c)

    def server(self, server: Server, mean: Update, share: float) -> Server:
        # Clients outside the cohort keep their control variates: (1/n) times the cohort's sum, not its mean.
        return Server(x=server.x + self.server_lr * mean.x, c=server.c + share * mean.c)

    def dual(self, s: Client) -> Tensor:
        return s.c

    def model(self, server: Server) -> Tensor:
        return server.x


class Node(NamedTuple):
    x: Tensor  # neighbours' weighted average of the models
    c: Tensor  # the node's control variate
    c_mean: Tensor  # its estimate of the mean control variate


@ALGORITHMS.register(
    "d-scaffold", family="corrected, between neighbours", paper="Local G-ECL's baseline (reconstruction)"
)
@dataclass(frozen=True)
class DSCAFFOLD(Algorithm):
    """SCAFFOLD between neighbours: every node tracks the mean control variate by gossip (reconstruction)."""

    columnwise: ClassVar[bool] = True

    lr: Rate
    local_steps: Count = 1
    naive: bool = False  # mix the control variates themselves: same traffic, biased on sparse graphs

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(x=x0, c=torch.zeros_like(x0), c_mean=torch.zeros_like(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        y = s.x
        for _ in range(self.local_steps):
            y = y - self.lr * (oracle.grad(y) - s.c + s.c_mean)
        c = s.c - s.c_mean + (s.x - y) / (self.local_steps * self.lr)
        mixed = peers.exchange(Update(x=y, c=c if self.naive else s.c_mean + c - s.c)).mixed
        return Node(x=mixed.x, c=c, c_mean=mixed.c)

    def dual(self, s: Node) -> Tensor:
        return s.c - s.c_mean

    def model(self, s: Node) -> Tensor:
        return s.x
