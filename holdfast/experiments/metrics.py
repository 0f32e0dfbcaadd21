"""What can be measured of a simulation after a round. Every metric is one small function, computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.precision import unrounded
from holdfast.core.tree import leaves, tree_map
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.columns import DELAY_COLUMNS, SOLVER_COLUMNS
from holdfast.experiments.config import Metrics
from holdfast.problem.reference.optimum import gradients_at_optimum, known_optimum

TestSet = Any  # a tree of samples, such as a pair (x, y)


class Measured:
    """The quantities that metrics are made of, for the models as they are now."""

    def __init__(self, simulation: Simulation, test: TestSet | None) -> None:
        self.simulation = simulation
        self.objective = simulation.problem
        self.test = test
        self.world = simulation.world
        self.one_model = isinstance(simulation.method, ServerAlgorithm)
        # [m, d] of the nodes here; [1, d] where all nodes hold the server's
        self.models = simulation.models.detach()[: 1 if self.one_model else None]
        # Around one of them, so that models that are equal have exactly that average.
        centre = self.world.of_leader(self.models[0])
        self.average = centre + self.mean(self.models - centre)  # [d]

    def mean(self, of_models: Tensor) -> Tensor:
        """The mean over all models of what is given for those here, [m, ...]."""
        if self.one_model:
            return of_models[0]
        return self.world.mean(of_models, self.objective.nodes)

    @cached_property
    def node_accuracies(self) -> Tensor:
        """Test accuracy of the models of the nodes here, [m]; [1] where all nodes hold the server's."""
        if self.one_model:
            return self.average_test[0]
        assert self.test is not None
        nodes, world = self.simulation.nodes, self.world
        return self.objective.test(self.objective.complete(self.models, nodes, world.sum), self.test)[0]

    @cached_property
    def common(self) -> Tensor:
        """The average model with all that evaluation needs, see ``Problem.complete``."""
        return self.objective.complete(self.average[None], None, self.world.sum)[0]

    @cached_property
    def average_test(self) -> tuple[Tensor, Tensor]:
        """Test accuracy and test loss of the average model, each [1]; every process takes some samples."""
        assert self.test is not None
        samples = len(next(leaves(self.test)))
        here = tree_map(lambda part: part[self.world.rank :: self.world.size], self.test)
        figures = torch.zeros(2, 1, dtype=torch.float64, device=self.average.device)
        common = self.common.unsqueeze(0)
        if count := len(next(leaves(here))):
            figures = torch.stack(self.objective.test(common, here)) * (count / samples)
        accuracy, loss = self.world.sum(figures)
        return accuracy, loss

    @cached_property
    def global_gradient(self) -> Tensor:
        """Gradient of f at the average model, [d]."""
        with unrounded():  # in TF32, its norm would never fall below a thousandth of its terms
            return self.world.sum(self.objective.global_value_and_grad(self.common)[1])

    @cached_property
    def consensus(self) -> Tensor:
        """(1/n) sum_i ||x_i - average||^2."""
        return self.mean((self.models - self.average).square().sum(-1))

    @cached_property
    def duals(self) -> Tensor:
        """The estimates that the nodes here have of their own gradients at the optimum, [m, d]."""
        duals = self.simulation.rounds.duals(self.simulation.state)
        if duals is None:
            name = type(self.simulation.method).__name__
            raise HoldfastError(
                f"metric 'dual_error': {name} keeps no estimate of the gradients at the optimum"
            )
        return duals


Metric = Callable[[Measured], Tensor]


def test_accuracy(m: Measured) -> Tensor:
    """Test accuracy, mean over the nodes' own models."""
    return m.mean(m.node_accuracies)


def worst_accuracy(m: Measured) -> Tensor:
    """Test accuracy of the worst node."""
    return m.world.lowest(m.node_accuracies.min())


def average_accuracy(m: Measured) -> Tensor:
    """Test accuracy of the average model."""
    return m.average_test[0]


def average_loss(m: Measured) -> Tensor:
    """Test loss of the average model."""
    return m.average_test[1]


def train_loss(m: Measured) -> Tensor:
    """The common objective f at the average model, regulariser included."""
    with unrounded():
        return m.world.sum(m.objective.global_value(m.common))


def consensus(m: Measured) -> Tensor:
    """Consensus error (1/n) sum_i ||x_i - average||^2."""
    return m.consensus


def grad_norm2(m: Measured) -> Tensor:
    """Squared norm of the global gradient at the average model; reads all training data."""
    return m.global_gradient.square().sum()


def stationarity(m: Measured) -> Tensor:
    """NET-FLEET's measure: grad_norm2 + consensus; reads all training data."""
    return m.global_gradient.square().sum() + m.consensus


def rel_energy(m: Measured) -> Tensor:
    """(f - f*)/f* at the average model; convex problems: finds the optimum first, reads all training data."""
    best = known_optimum(m.objective, m.world).value
    if best == 0:
        raise HoldfastError("metric 'rel_energy': the optimal value is 0; use 'optimum_distance' instead")
    energy = m.world.sum(m.objective.in_float64.global_value(m.average.double()))
    return (energy - best) / abs(best)


def optimum_distance(m: Measured) -> Tensor:
    """Distance ||average - x*|| to the optimum; convex problems."""
    away: Tensor = m.average - known_optimum(m.objective, m.world).x
    return away.norm()  # type: ignore[no-any-return]


def dual_error(m: Measured) -> Tensor:
    """sum_i ||dual_i - grad f_i(x*)||^2; convex problems, and methods that keep duals."""
    return m.world.sum((m.duals - gradients_at_optimum(m.objective, m.world)).square().sum())


METRICS: dict[str, Metric] = {
    metric.__name__: metric
    for metric in (
        test_accuracy,
        worst_accuracy,
        average_accuracy,
        average_loss,
        train_loss,
        consensus,
        grad_norm2,
        stationarity,
        rel_energy,
        optimum_distance,
        dual_error,
    )
}
NEEDS_ACCURACY = frozenset({"test_accuracy", "worst_accuracy", "average_accuracy"})
NEEDS_TEST_SET = NEEDS_ACCURACY | {"average_loss"}
EXPENSIVE = frozenset({"grad_norm2", "stationarity", "rel_energy", "optimum_distance", "dual_error"})
"""Only when asked for."""


def available_metrics(has_test: bool, has_accuracy: bool) -> list[str]:
    """The metrics that can be computed, in their order."""
    missing = (frozenset() if has_test else NEEDS_TEST_SET) | (
        frozenset() if has_accuracy else NEEDS_ACCURACY
    )
    return [name for name in METRICS if name not in missing]


def choose_metrics(wanted: Metrics, *, has_test: bool, has_accuracy: bool) -> list[str]:
    """``wanted``, checked; "default" is every metric that is available and cheap."""
    available = available_metrics(has_test, has_accuracy)
    if wanted == "default":
        return [name for name in available if name not in EXPENSIVE]
    for name in wanted:
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
        if name not in available:
            lacking = "a test set" if name in NEEDS_TEST_SET and not has_test else "a loss with classes"
            raise HoldfastError(f"metric {name!r} needs {lacking}, and this problem has none")
    return wanted


def measure(simulation: Simulation, test: TestSet | None, metrics: list[str]) -> dict[str, float]:
    """The chosen metrics, then what the run has cost so far."""
    measured, work = Measured(simulation, test), simulation.total_work()
    values = {name: float(METRICS[name](measured)) for name in metrics}
    extra: dict[str, float] = {}
    if simulation.network.activity is not None:
        extra |= delays(simulation)
    if simulation.method.uses_solver:
        extra |= dict(zip(SOLVER_COLUMNS, (work.value_evaluations, work.unfinished_solves), strict=True))
    costs = {
        "payload_bytes": simulation.payload_bytes,
        "payload_bytes_per_link": simulation.payload_bytes / simulation.network.directed_links,
        "gradient_evaluations": work.gradient_evaluations,
        "sample_gradients": work.sample_gradients,
    }
    return values | extra | costs


def delays(simulation: Simulation) -> dict[str, float]:
    """DSpodFL's delays so far: 1 for each gradient by all nodes, 1 for each vector over all links, their sum.

    A node that computes with probability d_i takes 1/d_i, and a link 1/b_ij, of its share in that 1.
    """
    processing, transmission = simulation.total_work().delay, simulation.traffic.delay
    return dict(zip(DELAY_COLUMNS, (processing, transmission, processing + transmission), strict=True))
