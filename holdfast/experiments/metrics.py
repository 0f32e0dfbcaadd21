"""What can be measured of a simulation after a round. Every metric is one small function, computed once."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import ServerAlgorithm
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.precision import unrounded
from holdfast.core.registry import import_named
from holdfast.core.validation import quoted
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.model_figures import HeldOut, ModelFigures, Reads, Score
from holdfast.experiments.option_forms import GivenMetrics
from holdfast.experiments.record_files import DELAY_COLUMNS, EPSILON_COLUMN, SOLVER_COLUMNS
from holdfast.problem.optimum import gradients_at_optimum, known_optimum

# --- what can be measured of a simulation after a round. Every metric is one small function -------------


@dataclass(frozen=True)
class Metric:
    """A figure of the models as they are now, and what it takes."""

    compute: Callable[[ModelFigures], Tensor]  # a single number
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


def metric(reads: Reads, **options: Any) -> Callable[[Callable[[ModelFigures], Tensor]], None]:
    """Registers a function under its name."""

    def register(compute: Callable[[ModelFigures], Tensor]) -> None:
        METRICS[compute.__name__] = Metric(compute, reads, **options)

    return register


@metric(Reads.NODES_ON_TEST, accuracy=True)
def test_accuracy(m: ModelFigures) -> Tensor:
    """Test accuracy, mean over the nodes' own models."""
    return m.mean(m.node_tests["accuracy"])


@metric(Reads.NODES_ON_TEST, accuracy=True)
def worst_accuracy(m: ModelFigures) -> Tensor:
    """Test accuracy of the worst node."""
    return m.world.lowest(m.of_honest(m.node_tests["accuracy"]).min())


@metric(Reads.AVERAGE_ON_TEST, accuracy=True)
def average_accuracy(m: ModelFigures) -> Tensor:
    """Test accuracy of the average model."""
    return m.average_test[0]


@metric(Reads.AVERAGE_ON_TEST, falls=True)
def average_loss(m: ModelFigures) -> Tensor:
    """Test loss of the average model."""
    return m.average_test[1]


@metric(Reads.TRAIN, falls=True)
def train_loss(m: ModelFigures) -> Tensor:
    """The common objective f at the average model, regulariser included."""
    with unrounded():
        return m.world.sum(m.problem.global_value(m.common))


@metric(Reads.NOTHING, falls=True)
def consensus(m: ModelFigures) -> Tensor:
    """Consensus error (1/n) sum_i ||x_i - average||^2."""
    return m.consensus


@metric(Reads.TRAIN_GRADIENT, default=False, falls=True)
def grad_norm2(m: ModelFigures) -> Tensor:
    """Squared norm of the global gradient at the average model; reads all training data."""
    return m.global_gradient.square().sum()


@metric(Reads.TRAIN_GRADIENT, default=False, falls=True)
def stationarity(m: ModelFigures) -> Tensor:
    """NET-FLEET's measure: grad_norm2 + consensus; reads all training data."""
    return m.global_gradient.square().sum() + m.consensus


@metric(Reads.TRAIN, default=False, falls=True)
def rel_energy(m: ModelFigures) -> Tensor:
    """(f - f*)/f* at the average model; convex problems: finds the optimum first, reads all training data."""
    best = known_optimum(m.problem, m.world).value
    if best == 0:
        raise HoldfastError("metric 'rel_energy': the optimal value is 0; use 'optimum_distance' instead")
    energy = m.world.sum(m.problem.in_float64.global_value(m.average.double()))
    return (energy - best) / abs(best)


@metric(Reads.NOTHING, default=False, falls=True)
def optimum_distance(m: ModelFigures) -> Tensor:
    """Distance ||average - x*|| to the optimum; convex problems."""
    away: Tensor = m.average - known_optimum(m.problem, m.world).x
    return away.norm()  # type: ignore[no-any-return]


@metric(Reads.NOTHING, default=False, falls=True)
def dual_error(m: ModelFigures) -> Tensor:
    """sum_i ||dual_i - grad f_i(x*)||^2; convex problems, and methods that keep duals."""
    return m.world.sum((m.duals - gradients_at_optimum(m.problem, m.world)).square().sum())


@metric(Reads.NOTHING, default=False, must_be_finite=False, falls=True)
def minibatch_loss(m: ModelFigures) -> Tensor:
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


# --- metrics by name: those that are registered, and what can be said of a figure on the test set -------
#
# A figure is "accuracy", "loss", or a score of the user's. Of the figure f there is
#
# - ``average_f``: of the average model; a score alone, ``f``, is the same;
# - ``test_f``: the mean over the nodes' own models; ``worst_f`` (accuracy and loss), ``p10_f``: their
#   percentiles; ``node_f``: all of them, in columns ``f_node0`` ...;
# - ``personal_f``: the mean over personalised models; ``worst_personal_f``, ``p10_personal_f``,
#   ``node_personal_f`` as above;
# - ``accuracy`` may be the user's where the loss has none;
# - ``class_accuracy``: that of the average model for each class, in columns ``accuracy_class0`` ...


SAID = r"(average|test|worst|node|p\d+)"


@dataclass(frozen=True)
class Choosing:
    """What a problem has to be measured: classes None without accuracy, 0 if they are not known."""

    nodes: int
    has_test: bool
    classes: int | None
    scores: dict[str, Score] = field(default_factory=dict)
    finite: bool = True  # whether all training samples can be read

    def metrics(self, name: str) -> dict[str, Metric]:
        """The metric called ``name``, or the columns that it stands for."""
        if name == "default":
            chosen = [self._found(name) for name, metric in METRICS.items() if metric.default]
            return {
                name: metric
                for found in chosen
                for name, metric in found.items()
                if self._lacking(metric) is None
            }
        found = self._found(name)
        for metric in found.values():
            if lacking := self._lacking(metric):
                raise HoldfastError(f"metric {name!r} needs {lacking}")
        return found

    def _found(self, name: str) -> dict[str, Metric]:
        """A registered metric, unless it is of an accuracy of the user's own; or what is derived."""
        registered = METRICS.get(name)
        if registered is None or (registered.accuracy and "accuracy" in self.scores):
            return self._derived(name)
        return {name: registered}

    def _lacking(self, metric: Metric) -> str | None:
        if not self.finite and metric.reads in (Reads.TRAIN, Reads.TRAIN_GRADIENT):
            return "training samples that come to an end, and these do not"
        if metric.needs_test and not self.has_test:
            return "a test set: give test="
        if metric.accuracy and self.classes is None:
            return (
                "an accuracy, and this loss has none: give your own, "
                'metrics={"accuracy": lambda outputs, targets: ...}'
            )
        return None

    def _derived(self, name: str) -> dict[str, Metric]:
        if name == "class_accuracy":
            if self.classes == 0:
                raise HoldfastError("metric 'class_accuracy' needs class numbers as targets; these are none")
            make = partial(Metric, reads=Reads.AVERAGE_ON_TEST, accuracy=True, must_be_finite=False)
            return {f"accuracy_class{c}": make(_of_class(c)) for c in range(self.classes or 1)}
        for figure in ("accuracy", "loss", *self.scores):
            parts = re.fullmatch(rf"(?:{SAID}_)?(personal_)?{re.escape(figure)}", name)
            if parts is None:
                continue
            said, personal = parts[1], parts[2] is not None
            if personal and said not in ("average", "test"):
                return self._of_nodes(name, figure, said or "test", personal)
            if (not personal and said in ("test", "worst", "node")) or (said or "").startswith("p"):
                return self._of_nodes(name, figure, said, personal)
            if not personal and figure in self.scores:
                options = self._options(figure)
                return {name: Metric(_of_average(figure), Reads.AVERAGE_ON_TEST, **options)}
        prefixes, figures = ("test", "worst", "p10", "node", "personal"), ("accuracy", "loss", *self.scores)
        known = [f"{prefix}_{figure}" for figure in figures for prefix in prefixes]
        raise unknown("metric", name, {*METRICS, *known, "class_accuracy", *self.scores})

    def _of_nodes(self, name: str, figure: str, said: str, personal: bool) -> dict[str, Metric]:
        """What is ``said`` of a figure of all nodes: its mean ("test"), the worst, a percentile, or all."""
        figures = _personal_tests if personal else _node_tests
        reads = Reads.PERSONAL_ON_TEST if personal else Reads.NODES_ON_TEST
        options = self._options(figure)
        if said == "node":
            column = name.removeprefix("node_") + "_node"
            picks = {f"{column}{i}": _picked(figures, figure, i) for i in range(self.nodes)}
            return {column: Metric(pick, reads, **options) for column, pick in picks.items()}
        compute = _over_nodes(figures, figure, self._reduction(name, figure, said))
        return {name: Metric(compute, reads, **options)}

    def _options(self, figure: str) -> dict[str, Any]:
        score = (figure, self.scores[figure]) if figure in self.scores else None
        of_loss = figure == "accuracy" and score is None
        return {"accuracy": of_loss, "must_be_finite": figure == "loss", "score": score}

    def _reduction(self, name: str, figure: str, said: str) -> Callable[[Tensor], Tensor]:
        if said == "test":
            return torch.mean
        if said == "worst":
            if figure in self.scores and figure != "accuracy":
                raise HoldfastError(
                    f"metric {name!r}: whether a high {figure} is bad is not known; use p0 or p100"
                )
            return torch.amin if figure == "accuracy" else torch.amax
        percent = int(said.removeprefix("p"))
        if percent > 100:
            raise HoldfastError(f"metric {name!r}: a percentile lies between 0 and 100")
        return lambda values: torch.quantile(values, percent / 100)


def choose_metrics(
    wanted: GivenMetrics, *, has_test: bool, classes: int | None, nodes: int = 1, finite: bool = True
) -> dict[str, Metric]:
    """``wanted``, checked, column by column; "default" stands for all that are available and cheap.

    A score of the user's may be named as ``module:attribute``. ``finite``: whether samples have an end.
    """
    scores: dict[str, Score] = {}
    names: list[str] = []
    for item in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(item, str) and ":" not in item:
            names.append(item)
            continue
        own = {item.partition(":")[2]: item} if isinstance(item, str) else item
        scores |= {name: _score(name, score, classes) for name, score in own.items()}
        names += own
    choosing = Choosing(nodes, has_test, classes, scores, finite)
    chosen: dict[str, Metric] = {}
    for name in names:
        chosen |= choosing.metrics(name)
    return chosen


def _score(name: str, given: Any, classes: int | None) -> Score:
    if name in METRICS or name in ("loss", "default") or (name == "accuracy" and classes is not None):
        raise HoldfastError(f"metric {name!r}: this name is taken; call yours something else")
    score = import_named("metric", given, "my_metrics:mae") if isinstance(given, str) else given
    if isinstance(score, type):
        score = score()  # such as a class of torchmetrics
    if not callable(score):
        raise HoldfastError(
            f"metric {name!r}: expected a function of (outputs, targets), got {quoted(score)}"
        )
    checked: Score = score
    return checked


Figures = Callable[[ModelFigures], Mapping[str, Tensor]]


def _node_tests(m: ModelFigures) -> Mapping[str, Tensor]:
    return m.node_tests


def _personal_tests(m: ModelFigures) -> Mapping[str, Tensor]:
    return m.personal_tests


def _of_average(figure: str) -> Callable[[ModelFigures], Tensor]:
    return lambda m: m.average_scores[figure]


def _of_class(c: int) -> Callable[[ModelFigures], Tensor]:
    def accuracy(m: ModelFigures) -> Tensor:
        known = m.class_accuracies
        return known[c] if c < len(known) else known.new_full((), torch.nan)

    return accuracy


def _picked(figures: Figures, figure: str, node: int) -> Callable[[ModelFigures], Tensor]:
    return lambda m: m.everybody(figures(m)[figure])[node]


def _over_nodes(
    figures: Figures, figure: str, reduce: Callable[[Tensor], Tensor]
) -> Callable[[ModelFigures], Tensor]:
    return lambda m: reduce(m.of_honest(m.everybody(figures(m)[figure].double())))


# --- what is measured of a run, how often, and what that costs ------------------------------------------


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
        measured = ModelFigures(simulation, self.test, self.scores, self.personalize)
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
        work, problem = simulation.work_per_round, simulation.problem
        minibatches = work.sample_gradients / problem.nodes
        others = work.gradient_evaluations / problem.nodes - minibatches
        nodes = torch.arange(problem.nodes, device=simulation.nodes.device)
        samples = minibatches * problem.samples_per_minibatch(nodes) + others * problem.samples(nodes)
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
    if simulation.method.capabilities.uses_solver:
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
