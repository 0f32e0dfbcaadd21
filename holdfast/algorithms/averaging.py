"""A local phase after which the mixed model tells each node how far its gradients are off."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from holdfast.contract import (
    Gradient,
    LocalOptimizer,
    LocalSteps,
    Memory,
    Oracle,
    Peers,
    most_steps,
)


class Progress(NamedTuple):
    x: Tensor
    v: Tensor  # mean gradient of the round that the optimiser saw


class Averaged(NamedTuple):
    """What a node knows after the exchange."""

    x: Tensor  # its own model before
    mean: Tensor  # the mixed model; with a server, the mean of all nodes
    excess: Tensor  # its mean gradient of the round minus that of those it mixes with
    memory: Memory  # the optimiser's


def descend_and_average(
    optimizer: LocalOptimizer,
    start: Tensor,
    gradient: Gradient,
    lr: float,
    local_steps: LocalSteps,
    memory: Memory,
    oracle: Oracle,
    peers: Peers,
) -> Averaged:
    """Local steps from ``start``, and an exchange of models.

    Models alone tell the excess, (mean - x)/(steps lr), where the start is the same, as behind a server. On a
    graph starts differ, and the differences vanish with the disagreement. Only where the optimiser rescales
    gradients, their mean has to be sent as well.

    Where nodes take unequal numbers of steps, all divide by the largest. Only a common divisor leaves the sum
    of all excesses at zero, and a smaller one might diverge: it is 1/c of NIDS with a step size per node (Li,
    Shi and Yan 2019), which asks for c <= 1/max_i(steps_i lr).
    """
    steps = oracle.steps(local_steps)
    if optimizer.rescales:
        x, v, memory = optimizer.descend_and_track(start, gradient, lr, steps, memory)
        mixed = peers.exchange(Progress(x, v)).mixed
        return Averaged(x, mixed.x, v - mixed.v, memory)
    x, memory = optimizer.descend(start, gradient, lr, steps, memory)
    mean = peers.exchange(x).mixed
    return Averaged(x, mean, (mean - x) / (most_steps(local_steps) * lr), memory)
