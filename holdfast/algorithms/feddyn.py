"""FedDyn: every client's objective is regularised so that all of them share the common optimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.proximal import check_solver_options, gradient_steps
from holdfast.contract import (
    ALGORITHMS,
    Capabilities,
    LocalSteps,
    Memory,
    Optimizer,
    Oracle,
    ServerAlgorithm,
)
from holdfast.contract.parameters import Rate
from holdfast.optimizers import PLAIN
from holdfast.solvers import LocalSolver, Newton, Solver


class Client(NamedTuple):
    g: Tensor  # tends to the client's own gradient at the optimum
    memory: Memory = ()  # the optimiser's


class Server(NamedTuple):
    x: Tensor
    h: Tensor  # always the mean of all clients' g


STEPS = ("lr", "local_steps", "optimizer")
SOLVER_USES = {"exact": (), "gd": STEPS, "sgd": STEPS}


@ALGORITHMS.register("feddyn", family="primal-dual, with a server", paper="Acar et al. 2021")
@dataclass(frozen=True)
class FedDyn(ServerAlgorithm[Server]):
    """Dynamic regularisation: exact with half of SCAFFOLD's traffic, cohorts too (Acar et al. 2021)."""

    declared = Capabilities(
        uses_solver=True,
        compensates=True,  # what a message lacks stays in g, and so in the next one
        unequal_steps=True,
        late_clients=True,
        columnwise=True,
    )

    alpha: Rate  # weight of (alpha/2) ||x_i - x||^2
    # gd: full gradients, sgd: minibatches; exact: Newton's method; or a solver that is nearly so
    solver: Literal["exact", "gd", "sgd"] | LocalSolver = "sgd"
    lr: Rate | None = None  # gd, sgd: step size; 1/(L + alpha) is safe
    local_steps: LocalSteps = 1  # gd, sgd
    optimizer: Optimizer = PLAIN  # gd, sgd

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver_options(self, self.solver, SOLVER_USES)

    @property
    def capabilities(self) -> Capabilities:
        why = "" if self.solver == "sgd" else "only the solver 'sgd' takes so many steps"
        return self.declared.with_equal_steps(why)

    def init(self, x0: Tensor) -> Client:
        return Client(g=torch.zeros_like(x0), memory=self.optimizer.memory(x0))

    def init_server(self, x0: Tensor) -> Server:
        return Server(x=x0, h=torch.zeros_like(x0))

    def broadcast(self, server: Server) -> Tensor:
        return server.x

    def client(self, s: Client, received: Tensor, oracle: Oracle) -> tuple[Client, Tensor]:
        if self.solver in ("gd", "sgd"):
            x, memory = gradient_steps(self, oracle, -s.g, received, self.alpha, received, s.memory)
        else:
            solver = self.solver if isinstance(self.solver, Solver) else Newton()
            x, memory = oracle.argmin(-s.g, received, self.alpha, received, solver), ()
        return s._replace(memory=memory), x - received

    def server(self, server: Server, mean: Tensor, share: float) -> Server:
        # Clients outside the cohort keep their g: (1/n) times the cohort's sum, not its mean.
        h = server.h - self.alpha * share * mean
        return Server(x=server.x + mean - h / self.alpha, h=h)

    def finish(self, s: Client, sent: Tensor, answer: tuple[()], oracle: Oracle) -> Client:
        return s._replace(g=s.g - self.alpha * sent)

    def dual(self, s: Client) -> Tensor:
        return s.g

    def model(self, server: Server) -> Tensor:
        return server.x
