"""PDMM and ECL: a dual variable at each end of every link (Local G-ECL, eq. 5).

Printed there, a node continues with its own dual; it must take the one it receives, as here, or it diverges.
"""

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
    Edges,
    Memory,
    Optimizer,
    Oracle,
    Peers,
)
from holdfast.contract.parameters import Rate
from holdfast.core.validation import Count, Positive
from holdfast.optimizers import PLAIN
from holdfast.solvers import LocalSolver, Newton

EXACT = Newton()


class Node(NamedTuple):
    x: Tensor  # the node's model
    z: Tensor  # [e, d]: one dual for each of its links; A z - x is a share of its gradient at the optimum
    memory: Memory = ()  # the optimiser's, in ECL


def start(x0: Tensor, edges: Edges) -> Node:
    """All duals at zero."""
    return Node(x=x0, z=torch.zeros_like(edges.spread(x0)))


def reflect(z: Tensor, x: Tensor, edges: Edges) -> Tensor:
    """What arrives over each link when all nodes send y = z - 2 A x."""
    return edges.swap(z - 2 * edges.sign * edges.spread(x))


@ALGORITHMS.register(
    "pdmm", family="a dual on every link", paper="Zhang and Heusdens 2018; Tyou et al. 2024, eq. 5"
)
@dataclass(frozen=True)
class PDMM(Algorithm):
    """Local solves with a dual at each end of every link (Zhang & Heusdens 2018; Local G-ECL, eq. 5)."""

    declared = Capabilities(topology="graph", constant_graph=True, uses_solver=True, columnwise=True)

    gamma: Rate  # how strongly a link pulls its two ends together
    theta: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the received dual; 0.5 is ADMM, slow but safe
    solver: LocalSolver = EXACT

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return start(x0, peers.edges)

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        edges = peers.edges
        # sum_j (gamma/2) ||A u - z||^2 = (gamma deg/2) ||u||^2 - gamma <sum_j A z, u> + const
        pull = -self.gamma * edges.total(edges.sign * s.z)
        x = oracle.argmin(pull, torch.zeros_like(s.x), self.gamma * peers.degree, s.x, self.solver)
        return Node(x=x, z=(1 - self.theta) * s.z + self.theta * reflect(s.z, x, edges))

    def model(self, s: Node) -> Tensor:
        return s.x


@ALGORITHMS.register("ecl", family="a dual on every link", paper="Niwa et al. 2020")
@dataclass(frozen=True)
class ECL(Algorithm):
    """PDMM with gradient steps instead of exact solves, Edge-Consensus Learning (Niwa et al. 2020)."""

    declared = Capabilities(topology="graph", constant_graph=True, columnwise=True)

    lr: Rate
    local_steps: Count = 1
    gamma: Positive | None = None  # as in PDMM; by default 1 / (lr * local_steps * the link's larger degree)
    optimizer: Optimizer = PLAIN

    def init(self, x0: Tensor, oracle: Oracle, peers: Peers) -> Node:
        return start(x0, peers.edges)._replace(memory=self.optimizer.memory(x0))

    def round(self, s: Node, oracle: Oracle, peers: Peers) -> Node:
        edges = peers.edges
        # Alike at both ends of a link: weights by the node's own degree would favour nodes with many links.
        default = 1 / (self.lr * self.local_steps * edges.degree)
        gamma = default if self.gamma is None else torch.full_like(default, self.gamma)
        pull, weight = edges.total(gamma * edges.sign * s.z), edges.total(gamma)
        # The proximal step (x - lr (g - pull)) / (1 + lr weight) is a gradient step of another length.
        x, memory = self.optimizer.descend(
            s.x,
            lambda x: oracle.grad(x) - pull + weight * x,
            self.lr / (1 + self.lr * weight),
            self.local_steps,
            s.memory,
        )
        return Node(x=x, z=reflect(s.z, x, edges), memory=memory)

    def model(self, s: Node) -> Tensor:
        return s.x
