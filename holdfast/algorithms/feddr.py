"""Splitting with local proximal steps: Douglas-Rachford (FedDR) and Peaceman-Rachford (FedSplit)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Oracle,
    Peers,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.solvers import LocalSolver, Newton, Solver

EXACT = Newton()


def proximal_point(oracle: Oracle, centre: Tensor, eta: float, start: Tensor, solver: Solver) -> Tensor:
    """argmin_u f_i(u) + ||u - centre||^2 / (2 eta)"""
    return oracle.argmin(torch.zeros_like(centre), centre, 1 / eta, start, solver=solver)


class Client(NamedTuple):
    y: Tensor  # tends to x* + eta times the client's own gradient there
    x: Tensor  # proximal point of y, from the client's first round on


class Server(NamedTuple):
    x: Tensor  # always the mean of all clients' reflected points 2 x_i - y_i


@ALGORITHMS.register("feddr", family="primal-dual, with a server", paper="Tran-Dinh et al. 2021")
@dataclass(frozen=True)
class FedDR(ServerAlgorithm[Server]):
    """Randomised Douglas-Rachford splitting; clients may be sampled (Tran-Dinh et al. 2021).

    The server's mean is kept up by increments and would carry a wrong start along for ever. So a client that
    has not yet taken part counts with x_i = y_i = x0 on both sides, and the paper's initial proximal steps
    happen in each client's first round: no traffic before the first round.
    """

    declared = Capabilities(uses_solver=True, late_clients=True, columnwise=True)

    eta: Rate  # proximal step
    alpha: Annotated[float, Field(gt=0, le=2)] = 1.0  # relaxation: 1 makes it FedPD, 2 FedSplit
    solver: LocalSolver = EXACT

    def init(self, x0: Tensor) -> Client:
        return Client(y=x0.clone(), x=x0)

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0)

    def broadcast(self, server: Server) -> Tensor:
        return server.x

    def client(self, s: Client, received: Tensor, oracle: Oracle) -> tuple[Client, Tensor]:
        y = s.y + self.alpha * (received - s.x)
        x = proximal_point(oracle, y, self.eta, s.x, self.solver)
        return Client(y=y, x=x), (2 * x - y) - (2 * s.x - s.y)

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        # Clients outside the cohort keep their points: (1/n) times the cohort's sum, not its mean.
        return Server(x=server.x + share * mean)

    def model(self, server: Server) -> Tensor:
        return server.x


class Node(NamedTuple):
    z: Tensor  # tends to x* - eta times the node's own gradient there
    x: Tensor  # the mean z of all nodes


@ALGORITHMS.register("fedsplit", family="primal-dual, with a server", paper="Pathak and Wainwright 2020")
@dataclass(frozen=True)
class FedSplit(Algorithm):
    """Peaceman-Rachford splitting, fastest with eta = 1/sqrt(mu L) (Pathak and Wainwright 2020)."""

    declared = Capabilities(topology="server", assumes_convex=True, uses_solver=True, columnwise=True)

    eta: Rate  # proximal step
    solver: LocalSolver = EXACT

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return Node(z=x0, x=x0)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        x = proximal_point(oracle, 2 * s.x - s.z, self.eta, s.x, self.solver)
        z = s.z + 2 * (x - s.x)
        return Node(z=z, x=peers.exchange(z).mixed)

    def model(self, s: Node) -> Tensor:
        return s.x
