"""What is measured of a run, how often, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.errors import HoldfastError, unknown
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.columns import DELAY_COLUMNS, SOLVER_COLUMNS
from holdfast.experiments.config import Metrics
from holdfast.experiments.metrics import METRICS, Measured, Metric, Reads, TestSet

# With evaluate_every = "auto": what measuring may cost, of what the rounds in between cost.
SHARE_OF_TRAINING = 0.2
PASSES_OF_A_GRADIENT = 3  # forward passes that one takes the time of: its own, and a backward pass of two


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a run by name, and the test set, if there is one, where the objective computes."""

    metrics: Mapping[str, Metric]
    test: TestSet | None = None

    def figures(self, simulation: Simulation) -> Tensor:
        """[k + 1] float64 where the models are: every metric, and whether all models are finite."""
        measured = Measured(simulation, self.test)
        values = [metric.compute(measured) for metric in self.metrics.values()]
        finite = torch.stack([torch.isfinite(measured.models).all()])
        return torch.cat([*(value.detach().double().reshape(1) for value in values), finite.double()])

    def row(self, figures: Sequence[float]) -> dict[str, float]:
        """``figures`` by name."""
        return dict(zip(self.metrics, figures, strict=False))

    def diverged(self, figures: Sequence[float]) -> bool:
        """Whether a model is not finite, or what is known of the objective; accuracies always are."""
        decisive = [
            value for value, metric in zip(figures, self.metrics.values(), strict=False) if metric.objective
        ]
        return not figures[-1] or not all(map(math.isfinite, decisive))

    def passes(self, simulation: Simulation) -> int:
        """Forward passes of one sample that ``figures`` costs, those of all processes together."""
        problem, test = simulation.problem, 0 if self.test is None else len(self.test[0])
        everything = problem.samples(torch.arange(problem.nodes, device=simulation.nodes.device))
        cost = {
            Reads.NOTHING: 0,
            Reads.TRAIN: everything,
            Reads.TRAIN_GRADIENT: PASSES_OF_A_GRADIENT * everything,
            Reads.AVERAGE_ON_TEST: test,
            Reads.NODES_ON_TEST: problem.nodes * test,
        }
        reads = {metric.reads for metric in self.metrics.values()}
        if isinstance(simulation.method, ServerAlgorithm) and Reads.NODES_ON_TEST in reads:
            reads = reads - {Reads.NODES_ON_TEST} | {Reads.AVERAGE_ON_TEST}  # all nodes hold one model
        return sum(cost[read] for read in reads)

    def auto_every(self, simulation: Simulation) -> int:
        """Rounds between measurements so that these cost at most a fifth of the rounds.

        Counted are forward passes of a sample, not seconds: the cadence is the same on every machine.
        """
        rounds, problem = simulation.rounds, simulation.problem
        cohort = None if rounds.cohort_size == problem.nodes else rounds.cohort_size
        cost = dry_run(simulation.method, simulation.network, cohort)
        nodes = torch.arange(problem.nodes, device=simulation.nodes.device)
        samples = cost.minibatches_per_round * problem.samples_per_minibatch(nodes)
        samples += (cost.gradients_per_round - cost.minibatches_per_round) * problem.samples(nodes)
        training = max(1.0, PASSES_OF_A_GRADIENT * samples)
        return max(1, math.ceil(self.passes(simulation) / (SHARE_OF_TRAINING * training)))


def choose_metrics(wanted: Metrics, *, has_test: bool, has_accuracy: bool) -> dict[str, Metric]:
    """``wanted``, checked; "default" stands for every metric that is available and cheap."""
    chosen: dict[str, Metric] = {}
    for name in [wanted] if isinstance(wanted, str) else wanted:
        if name == "default":
            chosen |= {
                name: metric
                for name, metric in METRICS.items()
                if metric.default and _lacking(metric, has_test, has_accuracy) is None
            }
            continue
        if name not in METRICS:
            raise unknown("metric", name, METRICS)
        if lacking := _lacking(METRICS[name], has_test, has_accuracy):
            raise HoldfastError(f"metric {name!r} needs {lacking}, and this problem has none")
        chosen[name] = METRICS[name]
    return chosen


def _lacking(metric: Metric, has_test: bool, has_accuracy: bool) -> str | None:
    if metric.needs_test and not has_test:
        return "a test set"
    return "a loss with classes" if metric.accuracy and not has_accuracy else None


def measure(simulation: Simulation, test: TestSet | None, names: Sequence[str]) -> dict[str, float]:
    """The metrics of these names, then what the run has cost so far."""
    evaluation = Evaluation({name: METRICS[name] for name in names}, test)
    return evaluation.row(evaluation.figures(simulation).tolist()) | costs(simulation)


def costs(simulation: Simulation) -> dict[str, float]:
    """What the run has cost so far."""
    work = simulation.total_work()
    extra: dict[str, float] = {}
    if simulation.network.activity is not None:
        extra |= delays(simulation)
    if simulation.method.uses_solver:
        extra |= dict(zip(SOLVER_COLUMNS, (work.value_evaluations, work.unfinished_solves), strict=True))
    return extra | {
        "payload_bytes": simulation.payload_bytes,
        "payload_bytes_per_link": simulation.payload_bytes / simulation.network.directed_links,
        "gradient_evaluations": work.gradient_evaluations,
        "sample_gradients": work.sample_gradients,
    }


def delays(simulation: Simulation) -> dict[str, float]:
    """DSpodFL's delays so far: 1 for each gradient by all nodes, 1 for each vector over all links, their sum.

    A node that computes with probability d_i takes 1/d_i, and a link 1/b_ij, of its share in that 1.
    """
    processing, transmission = simulation.total_work().delay, simulation.traffic.delay
    return dict(zip(DELAY_COLUMNS, (processing, transmission, processing + transmission), strict=True))
