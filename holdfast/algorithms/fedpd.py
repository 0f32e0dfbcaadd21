"""FedPD: a primal-dual method with a choice of local solvers that may skip communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.proximal import GradientSteps, check_solver_options, gradient_steps
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    LocalSteps,
    Memory,
    Optimizer,
    Oracle,
    Peers,
    most_steps,
)
from holdfast.contract.parameters import Chance, Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, NonNegative
from holdfast.optimizers import PLAIN
from holdfast.solvers import LocalSolver, Newton, Solver


class Node(NamedTuple):
    x: Tensor  # the node's own model
    common: Tensor  # x_{0,i}: its copy of the common model; copies differ after rounds without communication
    dual: Tensor  # lambda_i; tends to minus the node's own gradient at the optimum
    memory: Memory = ()  # the optimiser's


class ReducedNode(NamedTuple):
    """A node whose solver is variance-reduced."""

    x: Tensor
    common: Tensor
    dual: Tensor
    g: Tensor  # estimate of the node's full gradient at x, carried from round to round


SOLVER_USES = {
    "exact": (),
    "gd": ("lr", "local_steps", "optimizer", "tolerance"),
    "sgd": ("lr", "local_steps", "optimizer", "decreasing"),
    "vr": ("local_steps", "refresh_every", "gamma"),
}


@ALGORITHMS.register("fedpd", family="primal-dual, with a server", paper="Zhang et al. 2021, Alg. 2-4")
@dataclass(frozen=True)
class FedPD(Algorithm):
    """Augmented Lagrangian with a dual per node; exact if every round communicates (Zhang et al. 2021)."""

    declared = Capabilities(topology="server", uses_solver=True, unequal_steps=True, columnwise=True)

    eta: Rate  # inverse weight of the penalty ||x_i - x_0||^2 / (2 eta)
    # Oracle I: gd, sgd (Alg. 3); Oracle II: vr (Alg. 4); exact: Newton's method; or one that is nearly so
    solver: Literal["exact", "gd", "sgd", "vr"] | LocalSolver = "sgd"
    lr: Rate | None = None  # gd, sgd: step size eta_1; 1/(L + 1/eta) is safe
    local_steps: LocalSteps = 1  # gd, sgd, vr: Q
    tolerance: NonNegative = 0.0  # gd: a node whose squared gradient is below it stops early (eq. 8)
    decreasing: bool = False  # sgd: step q = 1..Q of round r is lr / sqrt(Q r / 5 + q)
    refresh_every: Count = 20  # vr: rounds between full gradients, I
    gamma: Rate | None = None  # vr: larger means longer steps; by default 4 eta
    skip: Chance = 0.0  # probability p of a round without communication
    communicate_every: Count = 1  # instead of ``skip``: rounds from one communication to the next
    optimizer: Optimizer = PLAIN  # gd, sgd

    def __post_init__(self) -> None:
        super().__post_init__()
        check_solver_options(self, self.solver, SOLVER_USES)
        if self.skip == 1:  # a schedule may say so for some rounds
            raise HoldfastError("FedPD.skip: should be less than 1, got 1.0: nodes would never communicate")
        if self.communicate_every > 1 and self.skip != 0:
            raise HoldfastError("FedPD: give either skip or communicate_every, not both")
        if (self.decreasing or self.tolerance) and not self.optimizer.plain:
            raise HoldfastError(
                "FedPD.optimizer: decreasing steps, and those that end at a tolerance, are plain ones; leave "
                "out either them or the optimizer"
            )

    @property
    def capabilities(self) -> Capabilities:
        plain = self.solver == "sgd" and not self.decreasing
        why = "" if plain else "only the solver 'sgd', with steps of one size, takes so many"
        return self.declared.with_equal_steps(why)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node | ReducedNode:
        dual = torch.zeros_like(x0)
        if self.solver == "vr":
            return ReducedNode(x=x0, common=x0, dual=dual, g=torch.zeros_like(x0))
        return Node(x=x0, common=x0, dual=dual, memory=self.optimizer.memory(x0))

    def round(self, s: Node | ReducedNode, oracle: Oracle, peers: Peers) -> Node | ReducedNode:
        s = oracle_2(self, s, oracle) if isinstance(s, ReducedNode) else self.oracle_1(s, oracle)
        dual = s.dual + (s.x - s.common) / self.eta
        common = s.x + self.eta * dual
        if self.communicates(oracle.round, peers):
            common = peers.exchange(common).mixed
        return s._replace(common=common, dual=dual)

    def oracle_1(self, s: Node, oracle: Oracle) -> Node:
        """Oracle I (Alg. 3): lowers the node's augmented Lagrangian, from the last x on."""
        if self.solver in ("gd", "sgd") and not self.decreasing and not self.tolerance:
            x, memory = gradient_steps(self, oracle, s.dual, s.common, 1 / self.eta, s.x, s.memory)
            return s._replace(x=x, memory=memory)
        return s._replace(x=oracle.argmin(s.dual, s.common, 1 / self.eta, s.x, self.solver_at(oracle.round)))

    def solver_at(self, round: int) -> Solver:
        if isinstance(self.solver, Solver):
            return self.solver
        if self.lr is None:
            return Newton()
        lr, steps = self.lr, most_steps(self.local_steps)  # the same for all: see ``capabilities``
        rates = [lr] * steps
        if self.decreasing:
            rates = [lr / (steps * round / 5 + q) ** 0.5 for q in range(1, steps + 1)]
        return GradientSteps(rates, minibatch=self.solver == "sgd", tolerance=self.tolerance)

    def communicates(self, round: int, peers: Peers) -> bool:
        if self.communicate_every > 1:
            return (round + 1) % self.communicate_every == 0
        return self.skip == 0 or not peers.coin(self.skip)

    def dual(self, s: Node | ReducedNode) -> Tensor:
        return -s.dual

    def model(self, s: Node | ReducedNode) -> Tensor:
        return s.common


def oracle_2(method: FedPD, s: ReducedNode, oracle: Oracle) -> ReducedNode:
    """Oracle II (Alg. 4): exact steps on the linearised Lagrangian, whose slope g follows that of f_i."""
    eta = method.eta
    gamma = 4 * eta if method.gamma is None else method.gamma
    u = s.x
    g = oracle.full_grad(u) if oracle.round % method.refresh_every == 0 else s.g
    for _ in range(most_steps(method.local_steps)):
        new = (eta * u + gamma * s.common - eta * gamma * (g + s.dual)) / (eta + gamma)
        there, here = oracle.grads(new, u)  # the same samples at both points
        u, g = new, g + there - here
    return s._replace(x=u, g=g)
