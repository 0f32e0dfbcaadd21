"""A-FedPD: FedPD for cohorts, where the duals of absent clients are kept up to date.

An absent client's dual moves as if the client had found the cohort's mean model. All such moves are alike, so
the server adds them up: that sum is also the mean of all duals. A client keeps how far its own is from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.proximal import check_solver_options, gradient_steps
from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    Memory,
    Optimizer,
    Oracle,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count
from holdfast.optimizers import PLAIN
from holdfast.solvers import LocalSolver, Newton, Solver


class Client(NamedTuple):
    excess: Tensor  # of the client's dual over the mean dual; sums to zero, tends to minus its own gradient
    memory: Memory = ()  # the optimiser's


class Server(NamedTuple):
    x: Tensor
    dual: Tensor  # the mean of all clients' duals, absent ones included
    moved: Tensor  # from the last x to the mean of the models that the cohort found


class Broadcast(NamedTuple):
    x: Tensor
    dual: Tensor


STEPS = ("lr", "local_steps", "optimizer")
SOLVER_USES = {"exact": (), "gd": STEPS, "sgd": STEPS}


@ALGORITHMS.register("a-fedpd", family="primal-dual, with a server", paper="Sun et al. 2024 (reconstruction)")
@dataclass(frozen=True)
class AFedPD(ServerAlgorithm[Server]):
    """FedPD with cohorts: duals of absent clients follow the cohort's mean (Sun et al. 2024)."""

    declared = Capabilities(
        uses_solver=True,
        answers=True,
        compensates=True,  # what a message lacks stays in the excess, and so in the next one
        columnwise=True,
    )

    eta: Rate  # inverse weight of the penalty ||x_i - x||^2 / (2 eta), 1/rho in the paper
    # gd: full gradients, sgd: minibatches; exact: Newton's method; or a solver that is nearly so
    solver: Literal["exact", "gd", "sgd"] | LocalSolver = "sgd"
    lr: Rate | None = None  # gd, sgd: step size; 1/(L + 1/eta) is safe
    local_steps: Count = 1  # gd, sgd
    optimizer: Optimizer = PLAIN  # gd, sgd

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver_options(self, self.solver, SOLVER_USES)

    def init(self, x0: Tensor) -> Client:
        return Client(excess=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def init_server(self, x0: Tensor) -> Server:
        zero = torch.zeros_like(x0)
        return Server(x=x0, dual=zero, moved=zero)

    def broadcast(self, server: Server) -> Broadcast:
        return Broadcast(x=server.x, dual=server.dual)

    def client(self, s: Client, received: Broadcast, oracle: Oracle) -> tuple[Client, Tensor]:
        dual, start = s.excess + received.dual, received.x.expand_as(s.excess)
        if self.solver in ("gd", "sgd"):
            x, memory = gradient_steps(self, oracle, dual, start, 1 / self.eta, start, s.memory)
        else:
            solver = self.solver if isinstance(self.solver, Solver) else Newton()
            x, memory = oracle.argmin(dual, start, 1 / self.eta, start, solver), ()
        return s._replace(memory=memory), x - start

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        # The dual of a client i of the cohort grows by (x_i - x)/eta, those of others by the mean of that.
        dual = server.dual + mean / self.eta
        return Server(x=server.x + mean + self.eta * dual, dual=dual, moved=mean)

    def answer(self, server: Server) -> Tensor:
        return server.moved

    def finish(self, s: Client, sent: Tensor, answer: Tensor, oracle: Oracle) -> Client:
        return s._replace(excess=s.excess + (sent - answer) / self.eta)

    def dual(self, s: Client) -> Tensor:
        return -s.excess

    def model(self, server: Server) -> Tensor:
        return server.x
