"""FedCM: every local step is drawn towards the direction that all clients took in the round before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    Oracle,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count, Share
from holdfast.optimizers import PLAIN


class Server(NamedTuple):
    x: Tensor
    direction: Tensor  # the clients' mean step of the round before, in the unit of gradients


@ALGORITHMS.register("fedcm", family="plain averaging", paper="Xu et al. 2021, Alg. 1")
@dataclass(frozen=True)
class FedCM(ServerAlgorithm[Server]):
    """FedAvg whose steps mix own gradients with the last common direction (Xu et al. 2021)."""

    declared = Capabilities(needs_exact_sums=False, clippable=True, columnwise=True)

    lr: Rate
    local_steps: Count = 1
    alpha: Share = 0.1  # share of the client's own gradient in a step; 1 is FedAvg
    server_lr: Rate = 1.0

    def init(self, x0: Tensor) -> tuple[()]:
        return ()

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, direction=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Server:
        return server

    def client(self, s: tuple[()], received: Server, oracle: Oracle) -> tuple[tuple[()], Tensor]:
        x, _ = PLAIN.descend(
            received.x,
            lambda x: self.alpha * oracle.grad(x) + (1 - self.alpha) * received.direction,
            self.lr,
            self.local_steps,
            (),
        )
        return s, x - received.x

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        direction = -mean / (self.local_steps * self.lr)
        return Server(x=server.x + self.server_lr * mean, direction=direction)

    def model(self, server: Server) -> Tensor:
        return server.x
