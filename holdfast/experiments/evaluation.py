"""What is measured of a run, how often, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.validation import Cohort
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.columns import DELAY_COLUMNS, EPSILON_COLUMN, SOLVER_COLUMNS
from holdfast.experiments.measured import HeldOut, Measured, Reads
from holdfast.experiments.metrics import METRICS, Metric
from holdfast.experiments.scores import Score

# With evaluate_every = "auto": what measuring may cost, of what the rounds in between cost.
SHARE_OF_TRAINING = 0.2
PASSES_OF_A_GRADIENT = 3  # forward passes that one takes the time of: its own, and a backward pass of two


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a run by name, and the test set, if there is one, where the objective computes."""

    metrics: Mapping[str, Metric]
    test: HeldOut | None = None
    personalize: int = 0  # local steps that make a node's model its own

    def figures(self, simulation: Simulation) -> Tensor:
        """[k + 1] float64 where the models are: every metric, and whether all models are finite."""
        measured = Measured(simulation, self.test, self.scores, self.personalize)
        values = [metric.compute(measured) for metric in self.metrics.values()]
        finite = torch.stack([torch.isfinite(measured.models).all()])
        return torch.cat([*(value.detach().double().reshape(1) for value in values), finite.double()])

    @property
    def repeatable(self) -> bool:
        """Whether ``figures`` does the same in every call: neither a user's code, nor new minibatches."""
        personal = any(metric.reads is Reads.PERSONAL_ON_TEST for metric in self.metrics.values())
        return not (self.scores or personal)

    @property
    def scores(self) -> dict[Reads, dict[str, Score]]:
        """The user's own, with what they read."""
        scores: dict[Reads, dict[str, Score]] = {}
        for metric in self.metrics.values():
            if metric.score is not None:
                name, score = metric.score
                scores.setdefault(metric.reads, {})[name] = score
        return scores

    def row(self, figures: Sequence[float]) -> dict[str, float]:
        """``figures`` by name."""
        return dict(zip(self.metrics, figures, strict=False))

    def diverged(self, figures: Sequence[float]) -> bool:
        """Whether a model is not finite, or what is known of the objective; accuracies always are."""
        decisive = [
            value
            for value, metric in zip(figures, self.metrics.values(), strict=False)
            if metric.must_be_finite
        ]
        return not figures[-1] or not all(map(math.isfinite, decisive))

    def passes(self, simulation: Simulation) -> int:
        """Forward passes of one sample that ``figures`` costs, those of all processes together."""
        problem, test = simulation.problem, 0 if self.test is None else self.test.samples
        of_nodes = test if self.test and self.test.own else problem.nodes * test
        everything = problem.samples(torch.arange(problem.nodes, device=simulation.nodes.device))
        cost = {
            Reads.NOTHING: 0,
            Reads.TRAIN: everything,
            Reads.TRAIN_GRADIENT: PASSES_OF_A_GRADIENT * everything,
            Reads.AVERAGE_ON_TEST: test,
            Reads.NODES_ON_TEST: of_nodes,
            Reads.PERSONAL_ON_TEST: of_nodes + self._steps(simulation),
        }
        reads = {metric.reads for metric in self.metrics.values()}
        one_model = isinstance(simulation.method, ServerAlgorithm) and simulation.personal_models is None
        if one_model and Reads.NODES_ON_TEST in reads and not (self.test and self.test.own):
            reads = reads - {Reads.NODES_ON_TEST} | {Reads.AVERAGE_ON_TEST}
        return sum(cost[read] for read in reads)

    def _steps(self, simulation: Simulation) -> int:
        """Forward passes that personalising all nodes takes."""
        nodes = torch.arange(simulation.problem.nodes, device=simulation.nodes.device)
        return PASSES_OF_A_GRADIENT * self.personalize * simulation.problem.samples_per_minibatch(nodes)

    def auto_every(self, simulation: Simulation) -> int:
        """Rounds between measurements so that these cost at most a fifth of the rounds.

        Counted are forward passes of a sample, not seconds: the cadence is the same on every machine.
        """
        rounds, problem = simulation.rounds, simulation.problem
        cohort: Cohort = "all" if rounds.cohort_size == problem.nodes else rounds.cohort_size
        cost = dry_run(simulation.method, simulation.network, cohort)
        nodes = torch.arange(problem.nodes, device=simulation.nodes.device)
        samples = cost.minibatches_per_round * problem.samples_per_minibatch(nodes)
        samples += (cost.gradients_per_round - cost.minibatches_per_round) * problem.samples(nodes)
        training = max(1.0, PASSES_OF_A_GRADIENT * samples)
        return max(1, math.ceil(self.passes(simulation) / (SHARE_OF_TRAINING * training)))


def measure(simulation: Simulation, test: HeldOut | None, names: Sequence[str]) -> dict[str, float]:
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
    if simulation.ledger is not None:
        extra[EPSILON_COLUMN] = simulation.ledger.epsilon
    return extra | {
        "payload_bytes": simulation.payload_bytes,
        "payload_bytes_per_link": simulation.payload_bytes / simulation.network.directed_links,
        "gradient_evaluations": work.gradient_evaluations,
        "sample_gradients": work.sample_gradients,
    }


def delays(simulation: Simulation) -> dict[str, float]:
    """DSpodFL's delays so far: 1 for each gradient by all nodes, 1 for each vector over all links, their sum.

    A node that computes with probability d_i takes 1/d_i, and a link 1/b_ij, of its share in that 1. Last
    comes the raw sum, in which 1/d_i and 1/b_ij are times as they stand: over those that took part,
    (1/n) sum_i [1/d_i + (1/deg_i) sum_j 1/b_ij].
    """
    work, traffic = simulation.total_work(), simulation.traffic
    both = (work.delay, traffic.delay)
    return dict(zip(DELAY_COLUMNS, (*both, sum(both), work.raw_delay + traffic.raw_delay), strict=True))
