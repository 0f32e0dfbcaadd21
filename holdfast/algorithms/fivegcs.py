"""5GCS: a primal-dual method of the "fifth generation" that allows client sampling."""

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
from holdfast.core.validation import NonNegative
from holdfast.solvers import LocalSolver, Newton

EXACT = Newton()


class Client(NamedTuple):
    u: Tensor  # dual: tends to the gradient of f_i - (mu/2) ||x||^2 at the optimum


class Server(NamedTuple):
    x: Tensor
    v: Tensor  # always the mean of all clients' duals


@ALGORITHMS.register(
    "5gcs", family="primal-dual, with a server", paper="Grudzien et al. 2022 (reconstruction)"
)
@dataclass(frozen=True)
class FiveGCS(ServerAlgorithm[Server]):
    """Dual proximal steps of a sampled cohort, accelerated (Grudzien et al. 2022; reconstruction).

    Duals are n times the paper's, so that nobody needs the number of clients n; its tau = 1/(2 gamma n) then
    becomes 1/(2 lr).
    """

    declared = Capabilities(
        assumes_convex=True,
        uses_solver=True,
        sends_gradients=True,  # that at the point that the client has found
        late_clients=True,
        columnwise=True,
    )

    lr: Rate  # primal step gamma; best near 1/sqrt(mu L)
    mu: NonNegative  # strong convexity of the objective
    solver: LocalSolver = EXACT

    def init(self, x0: Tensor) -> Client:
        return Client(u=torch.zeros_like(x0))

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, v=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Tensor:
        return self.predicted(server)

    def predicted(self, server: Server) -> Tensor:
        """Proximal step on (mu/2) ||x||^2 against the duals' mean."""
        return (server.x - self.lr * server.v) / (1 + self.lr * self.mu)

    def client(self, s: Client, received: Tensor, oracle: Oracle) -> tuple[Client, Tensor]:
        # argmin_y f_i(y) - (mu/2) ||y||^2 + (tau/2) ||y - centre||^2, with its two quadratics made one
        tau = 1 / (2 * self.lr)
        centre = received + s.u / tau
        y = oracle.argmin(-self.mu * centre, centre, tau - self.mu, received, solver=self.solver)
        u = oracle.full_grad(y) - self.mu * y
        return Client(u=u), u - s.u

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        return Server(x=self.predicted(server) - self.lr * mean, v=server.v + share * mean)

    def model(self, server: Server) -> Tensor:
        return server.x
