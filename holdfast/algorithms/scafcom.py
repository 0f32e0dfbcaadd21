"""SCALLION and SCAFCOM: SCAFFOLD with one vector up, which may be compressed.

A client sends an increment of its control variate, from which the server also finds the step of the model.
Both sides add up what arrived, so what a compressor left out is part of the next increment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    Memory,
    Optimizer,
    Oracle,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count, Share
from holdfast.optimizers import PLAIN


class Server(NamedTuple):
    x: Tensor
    c: Tensor  # always the mean of all clients' control variates


class Client(NamedTuple):
    c: Tensor  # control variate: the sum of what arrived at the server
    memory: Memory = ()  # the optimiser's


class Averaging(NamedTuple):
    """A client that averages its gradients over rounds."""

    c: Tensor
    v: Tensor  # the average
    memory: Memory = ()


@dataclass(frozen=True)
class _Increments(ServerAlgorithm[Server]):
    """What both have in common: all but the increment."""

    declared = Capabilities(compensates=True)

    lr: Rate
    local_steps: Count = 1
    server_lr: Rate = 1.0
    optimizer: Optimizer = PLAIN

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, c=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        return server

    def _mean_gradient(
        self, s: Client | Averaging, received: Server, oracle: Oracle
    ) -> tuple[Tensor, Memory]:
        """That of the local steps, which are SCAFFOLD's."""
        correction = received.c - s.c
        _, mean, memory = self.optimizer.descend_and_track(
            received.x, lambda y: oracle.grad(y) + correction, self.lr, self.local_steps, s.memory
        )
        return mean - correction, memory

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        step = self.server_lr * self.lr * self.local_steps
        # Clients outside the cohort keep their control variates: (1/n) times the cohort's sum, not its mean.
        return Server(x=server.x - step * (mean + server.c), c=server.c + share * mean)

    def finish(
        self, s: Client | Averaging, sent: Tensor, answer: tuple[()], oracle: Oracle
    ) -> Client | Averaging:
        return s._replace(c=s.c + sent)

    def dual(self, s: Client | Averaging) -> Tensor:
        return s.c

    def model(self, server: Server) -> Tensor:
        return server.x


@ALGORITHMS.register(
    "scallion", family="corrected, with a server", paper="Huang et al. 2023 (SCALLION, reconstruction)"
)
@dataclass(frozen=True)
class SCALLION(_Increments):
    """SCAFFOLD with one vector up; for unbiased compressors (Huang et al. 2023)."""

    declared = Capabilities(compensates=True, columnwise=True)

    alpha: Share = 1.0  # step of the control variate to the new gradient; smaller for coarser channels

    def init(self, x0: Tensor) -> Client:
        return Client(c=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def client(self, s: Client, received: Server, oracle: Oracle) -> tuple[Client, Tensor]:
        gradient, memory = self._mean_gradient(s, received, oracle)
        return s._replace(memory=memory), self.alpha * (gradient - s.c)


@ALGORITHMS.register(
    "scafcom", family="corrected, with a server", paper="Huang et al. 2023 (SCAFCOM, reconstruction)"
)
@dataclass(frozen=True)
class SCAFCOM(_Increments):
    """SCALLION that averages gradients over rounds, for any compressor such as top-k (Huang et al. 2023)."""

    declared = Capabilities(compensates=True, columnwise=True)

    beta: Share = 0.2  # share of a round's gradient in the average; 1 makes it SCALLION with alpha = 1

    def init(self, x0: Tensor) -> Averaging:
        zero = torch.zeros_like(x0)
        return Averaging(c=zero, v=zero, memory=self.optimizer.memory(x0))

    def client(self, s: Averaging, received: Server, oracle: Oracle) -> tuple[Averaging, Tensor]:
        gradient, memory = self._mean_gradient(s, received, oracle)
        v = (1 - self.beta) * s.v + self.beta * gradient
        return s._replace(v=v, memory=memory), v - s.c
