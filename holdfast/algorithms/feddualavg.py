"""FedDualAvg: local steps on the dual, so that averaging does not undo what a regulariser does."""

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
    State,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count, NonNegative


class Server(NamedTuple):
    z: Tensor  # start minus all steps so far: what the model would be without a regulariser
    elapsed: Tensor  # [1]: total length of those steps, by which the regulariser acts on z


@ALGORITHMS.register("feddualavg", family="primal-dual, with a server", paper="Yuan et al. 2021")
@dataclass(frozen=True)
class FedDualAvg(ServerAlgorithm[Server]):
    """Dual averaging for f + l1 ||x||_1 + (l2/2) ||x||^2; without both it is FedAvg (Yuan et al. 2021).

    The method adds the regulariser itself: leave it out of the objective, or, where other methods need it
    there, say ``l2_in_objective``. Without ``l2``, several local steps are biased on heterogeneous data; with
    it the bias dies out like 1/rounds.
    """

    declared = Capabilities(needs_exact_sums=False, clippable=True, columnwise=True)

    lr: Rate
    local_steps: Count = 1
    server_lr: Rate = 1.0
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    l2_in_objective: bool = False  # l2 is in the objective already: it is taken out of the gradients

    def init(self, x0: Tensor) -> State:
        return ()

    def init_server(self, x0: Tensor) -> Server:
        return Server(z=x0, elapsed=torch.zeros_like(x0[:1]))

    def broadcast(self, server: Server) -> Server:
        return server

    def client(self, s: State, received: Server, oracle: Oracle) -> tuple[State, Tensor]:
        z, elapsed = received
        for _ in range(self.local_steps):
            x = self.primal(z, elapsed)
            gradient = oracle.grad(x)
            z = z - self.lr * (gradient - self.l2 * x if self.l2_in_objective else gradient)
            elapsed = elapsed + self.lr
        return s, z - received.z

    def primal(self, z: Tensor, elapsed: Tensor) -> Tensor:
        """argmin_x ||x - z||^2/2 + elapsed (l1 ||x||_1 + (l2/2) ||x||^2)"""
        shrunk = torch.sign(z) * torch.clamp(z.abs() - elapsed * self.l1, min=0) if self.l1 else z
        return shrunk / (1 + elapsed * self.l2)

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        passed = self.server_lr * self.lr * self.local_steps
        return Server(z=server.z + self.server_lr * mean, elapsed=server.elapsed + passed)

    def model(self, server: Server) -> Tensor:
        return self.primal(*server)
