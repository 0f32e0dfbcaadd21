"""What can be measured of a simulation after a round. Every metric is one small function, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.precision import unrounded
from holdfast.experiments.measured import Measured, Reads
from holdfast.experiments.scores import Score
from holdfast.problem.reference.optimum import gradients_at_optimum, known_optimum


@dataclass(frozen=True)
class Metric:
    """A figure of the models as they are now, and what it takes."""

    compute: Callable[[Measured], Tensor]  # a single number
    reads: Reads
    score: tuple[str, Score] | None = None  # the user's own that it is made of, and its name
    accuracy: bool = False  # whether the loss must have one
    default: bool = True  # whether it is measured if nothing is said
    must_be_finite: bool = True  # whether the run has diverged if it is not
    falls: bool = False  # whether it falls, or settles, in a run that works

    @property
    def needs_test(self) -> bool:
        return self.reads in (Reads.AVERAGE_ON_TEST, Reads.NODES_ON_TEST, Reads.PERSONAL_ON_TEST)

    @property
    def summary(self) -> str:
        return self.compute.__doc__ or ""


METRICS: dict[str, Metric] = {}


def metric(reads: Reads, **options: Any) -> Callable[[Callable[[Measured], Tensor]], None]:
    """Registers a function under its name."""

    def register(compute: Callable[[Measured], Tensor]) -> None:
        METRICS[compute.__name__] = Metric(compute, reads, **options)

    return register


@metric(Reads.NODES_ON_TEST, accuracy=True)
def test_accuracy(m: Measured) -> Tensor:
    """Test accuracy, mean over the nodes' own models."""
    return m.mean(m.node_tests["accuracy"])


@metric(Reads.NODES_ON_TEST, accuracy=True)
def worst_accuracy(m: Measured) -> Tensor:
    """Test accuracy of the worst node."""
    return m.world.lowest(m.of_honest(m.node_tests["accuracy"]).min())


@metric(Reads.AVERAGE_ON_TEST, accuracy=True)
def average_accuracy(m: Measured) -> Tensor:
    """Test accuracy of the average model."""
    return m.average_test[0]


@metric(Reads.AVERAGE_ON_TEST, falls=True)
def average_loss(m: Measured) -> Tensor:
    """Test loss of the average model."""
    return m.average_test[1]


@metric(Reads.TRAIN, falls=True)
def train_loss(m: Measured) -> Tensor:
    """The common objective f at the average model, regulariser included."""
    with unrounded():
        return m.world.sum(m.problem.global_value(m.common))


@metric(Reads.NOTHING, falls=True)
def consensus(m: Measured) -> Tensor:
    """Consensus error (1/n) sum_i ||x_i - average||^2."""
    return m.consensus


@metric(Reads.TRAIN_GRADIENT, default=False, falls=True)
def grad_norm2(m: Measured) -> Tensor:
    """Squared norm of the global gradient at the average model; reads all training data."""
    return m.global_gradient.square().sum()


@metric(Reads.TRAIN_GRADIENT, default=False, falls=True)
def stationarity(m: Measured) -> Tensor:
    """NET-FLEET's measure: grad_norm2 + consensus; reads all training data."""
    return m.global_gradient.square().sum() + m.consensus


@metric(Reads.TRAIN, default=False, falls=True)
def rel_energy(m: Measured) -> Tensor:
    """(f - f*)/f* at the average model; convex problems: finds the optimum first, reads all training data."""
    best = known_optimum(m.problem, m.world).value
    if best == 0:
        raise HoldfastError("metric 'rel_energy': the optimal value is 0; use 'optimum_distance' instead")
    energy = m.world.sum(m.problem.in_float64.global_value(m.average.double()))
    return (energy - best) / abs(best)


@metric(Reads.NOTHING, default=False, falls=True)
def optimum_distance(m: Measured) -> Tensor:
    """Distance ||average - x*|| to the optimum; convex problems."""
    away: Tensor = m.average - known_optimum(m.problem, m.world).x
    return away.norm()  # type: ignore[no-any-return]


@metric(Reads.NOTHING, default=False, falls=True)
def dual_error(m: Measured) -> Tensor:
    """sum_i ||dual_i - grad f_i(x*)||^2; convex problems, and methods that keep duals."""
    return m.world.sum((m.duals - gradients_at_optimum(m.problem, m.world)).square().sum())


@metric(Reads.NOTHING, default=False, must_be_finite=False, falls=True)
def minibatch_loss(m: Measured) -> Tensor:
    """Loss of the round's own minibatches, mean over nodes and local steps, without regulariser; for free.

    Of the initial models: on the first round's first minibatches. NaN where a round draws none.
    """
    simulation = m.simulation
    if simulation.round == 0:
        first = [simulation.models.detach().contiguous()]
        [(losses, _)] = m.problem.minibatch_values_and_grads(first, simulation.nodes, 0, 0)
        return m.world.mean(losses, m.problem.nodes)
    total, count = m.world.sum(simulation.rounds.losses).unbind()
    return total / count
