"""APDA-Inexact: an accelerated primal-dual method with inexact local proximal steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.algorithms.feddr import proximal_point
from holdfast.contract import (
    ALGORITHMS,
    Algorithm,
    Capabilities,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import NonNegative, Positive
from holdfast.solvers import LocalSolver, Newton

EXACT = Newton()


class Node(NamedTuple):
    x: Tensor  # the node's own model
    y: Tensor  # dual: tends to minus the node's own gradient at the optimum; sums to zero
    y_ahead: Tensor  # the dual extrapolated


@ALGORITHMS.register(
    "apda-inexact", family="primal-dual, with a server", paper="Sadiev et al. 2022 (reconstruction)"
)
@dataclass(frozen=True)
class APDAInexact(Algorithm):
    """Primal-dual steps from inexact local proximal points, accelerated (reconstruction)."""

    declared = Capabilities(topology="server", assumes_convex=True, uses_solver=True, columnwise=True)

    lr: Rate  # primal step eta_x
    beta: Positive  # beta_y: how much of the local gradient enters the dual step; about 1/(2 L) to 1/L
    mu: NonNegative  # strong convexity of the objective
    dual_lr: Positive | None = None  # eta_y, by default 1/(32 lr); up to 1/lr is faster, if beta eta_y < 1
    solver: LocalSolver = EXACT

    @property
    def dual_step(self) -> float:
        return 1 / (32 * self.lr) if self.dual_lr is None else self.dual_lr

    @property
    def extrapolation(self) -> float:
        return max(2 / (2 + self.mu * self.lr), 1 - self.beta * self.dual_step)

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        zero = torch.zeros_like(x0)
        return Node(x=x0, y=zero, y_ahead=zero)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        near = proximal_point(oracle, s.x - self.lr * s.y_ahead, self.lr, s.x, self.solver)
        gradient = oracle.full_grad(near)
        x = s.x - self.lr * (gradient + s.y_ahead)  # the proximal point itself if that is exact
        sent = s.y + self.dual_step * (x - self.beta * (s.y + gradient))
        y = sent - peers.exchange(sent).mixed
        return Node(x=x, y=y, y_ahead=y + self.extrapolation * (y - s.y))

    def dual(self, s: Node) -> Tensor:
        return -s.y

    def model(self, s: Node) -> Tensor:
        return s.x
