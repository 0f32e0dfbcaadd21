"""What a method costs, found by running it on an objective that is zero: there is no formula to go stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.algorithms.base import Method
from holdfast.engines.simulate.simulation import Simulation
from holdfast.topology import Network
from holdfast.tree import leaves


@dataclass(frozen=True)
class Footprint:
    """Multiples of the model's dimension d, except for gradients."""

    vectors_at_start: int  # sent over the whole network before the first round
    vectors_per_round: int  # sent over the whole network in a round
    vectors_per_link: float  # the same, per directed link
    state_vectors: int  # kept by the whole network between rounds
    gradients_per_round: float  # per node


class ZeroObjective:
    """f_i = 0 in one dimension."""

    dim = 1
    l1 = 0.0
    smooth = True

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.x0 = torch.zeros(1)

    def minibatch_grads(self, points: Sequence[Tensor], nodes: Tensor, round: int, step: int) -> list[Tensor]:
        return [torch.zeros_like(x) for x in points]

    def full_grads(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def values(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.zeros(len(nodes))

    def hessians(self, x: Tensor, nodes: Tensor) -> Tensor:
        return torch.ones(len(nodes), 1, 1)  # invertible, also where no quadratic is added

    def hessian_products(self, x: Tensor, v: Tensor, nodes: Tensor) -> Tensor:
        return v

    def samples_per_minibatch(self, nodes: Tensor) -> int:
        return 0

    def samples(self, nodes: Tensor) -> int:
        return 0

    def global_value_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(()), torch.zeros_like(x)

    def global_value(self, x: Tensor) -> Tensor:
        return torch.zeros(())


def dry_run(method: Method, network: Network, cohort_size: int | None = None) -> Footprint:
    """One round of ``method`` over ``network`` in one dimension, counted."""
    simulation = Simulation(method, ZeroObjective(network.nodes), network, cohort_size=cohort_size)
    at_start, gradients = simulation.traffic.numbers, simulation.work.gradient_evaluations
    simulation.step()
    per_round = simulation.traffic.numbers - at_start
    return Footprint(
        vectors_at_start=at_start,
        vectors_per_round=per_round,
        vectors_per_link=per_round / network.directed_links,
        state_vectors=sum(tensor.numel() for tensor in leaves(simulation.state)),
        gradients_per_round=(simulation.work.gradient_evaluations - gradients) / network.nodes,
    )
