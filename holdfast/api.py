"""The Python interface: ``train`` a module on split data, or ``minimize`` given functions."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from holdfast.channels import Channel, ChosenChannel
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, switches_restored
from holdfast.core.validation import Count, Seed, check, quoted
from holdfast.data.federated import FederatedData, read_test
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.experiments.assembly import (
    Setting,
    Topology,
    as_network,
    build_simulation,
    cohort_size,
    convexity_warning,
)
from holdfast.experiments.callbacks import Callback, JobInfo, Row
from holdfast.experiments.config import BatchSize, Cohort, Metrics, Terms, Weighting
from holdfast.experiments.execution import Run, stop_signals
from holdfast.experiments.metrics import choose_metrics, measure
from holdfast.experiments.statuses import JobStatus
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, OwnStep, Step, as_loss
from holdfast.problem.problem import FunctionProblem
from holdfast.problem.statistics import Buffers

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

CALLER = 3  # stacklevel of the user's line, from inside ``train`` or ``minimize``: their decorator is between


@dataclass(frozen=True)
class History:
    """What was recorded: one row of metrics per evaluated round."""

    rows: list[Row]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, metric: str) -> list[float]:
        """All recorded values of one metric, such as ``history["test_accuracy"]``."""
        if metric not in self.rows[0]:
            raise HoldfastError(f"no metric {metric!r} was recorded; there are {', '.join(self.rows[0])}")
        return [row[metric] for row in self.rows]

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame (needs ``pip install 'holdfast[pandas]'``)."""
        try:
            import pandas
        except ImportError:
            raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
        return pandas.DataFrame(self.rows)

    def plot(self, metric: str | None = None) -> Figure:
        """One metric against the rounds; by default the first that was recorded."""
        from holdfast.report.figures import history_figure

        name = metric or next(key for key in self.rows[0] if key != "round")
        return history_figure(self["round"], self[name], name)


@dataclass(frozen=True)
class _Result:
    history: History
    status: JobStatus  # "done"; or what ended it early: "diverged", "interrupted" or "stopped"

    @property
    def diverged(self) -> bool:
        """Whether a figure became infinite or NaN."""
        return self.status == "diverged"


@dataclass(frozen=True)
class TrainResult(_Result):
    """A trained federation."""

    model: nn.Module  # the average of all nodes' models
    models: Tensor  # [n, d]: every node's parameters, flat


@dataclass(frozen=True)
class MinimizeResult(_Result):
    """The path of every node."""

    x: Tensor  # [rounds + 1, n, d]: each node's model after each round's exchange; fewer if it ended early


@switches_restored()
def train(
    algorithm: Method,
    *,
    model: nn.Module,
    data: FederatedData | Sequence[Any],
    topology: Topology = "server",
    rounds: int,
    batch_size: BatchSize = 32,
    loss: str | Loss | LossFunction = "cross-entropy",
    step: Step | None = None,
    test: Any = None,
    seed: int = 0,
    l2: float = 0.0,
    l1: float = 0.0,
    nonconvex: float = 0.0,
    weights: Weighting = "uniform",
    backend: BackendName = "auto",
    buffers: Buffers = "local",
    cohort: Cohort = "all",
    channel: Channel | str | dict[str, Any] = "identity",
    evaluate_every: int = 1,
    metrics: Metrics = "default",
    callbacks: Sequence[Callback] = (),
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["float32", "float64"] = "float32",
    precision: Precision = "tf32",
) -> TrainResult:
    """Trains ``model`` with ``algorithm`` on every node's own data, all nodes simulated on one device.

    Arguments are called as in an experiment file (docs/experiments.md).

    ``data``: the result of ``holdfast.partition``; or, for each node, a pair (x, y), a dictionary of tensors
    or a torch Dataset. x may be a tensor, a dictionary of the model's keyword arguments or a tuple of its
    arguments.
    ``loss``: a name such as "cross-entropy" or "mse", or a function of outputs and targets that gives a mean
    over the batch or a number for each sample, such as ``nn.CrossEntropyLoss(weight=...)``.
    ``step``: instead of a loss, ``step(model, batch)`` computes the loss of a batch, whose form is that of
    ``data``: ``step=lambda model, batch: model(**batch).loss``.
    ``test``: samples like a node's, on which models are tested.
    ``topology``: a name such as "ring" or "server" (as in an experiment, a dictionary with a name if it takes
    parameters), a graph (mixed with Metropolis weights), or a ``Network``.
    ``batch_size``: samples per gradient, drawn with replacement; "full" takes all of a node's data.
    ``l2``, ``l1``, ``nonconvex``: weights of (l2/2)||x||^2, ||x||_1 and sum x^2/(1 + x^2) in the objective.
    ``backend``: how gradients are computed, all nodes "stacked" in one call or in a "loop" over the nodes;
    "auto" stacks unless a layer cannot be stacked or is faster in a loop.
    ``buffers``: the running statistics of BatchNorm that a node's model is tested with: of its own data,
    "local", or the "average" over all nodes, which ``result.model`` has in any case.
    ``cohort``: clients sampled per round (server methods), or "all".
    ``channel``: how messages travel, such as "half" or ``hf.Half()``.
    ``metrics``: their names; "default" are all that are cheap.
    ``callbacks``: who watches, such as ``hf.Progress()``; see ``hf.Callback``. Ctrl-C ends training, and the
    result so far is returned with the status "interrupted".
    ``precision``: of matrix products on a GPU, "tf32" or strict "float32"; "bfloat16" computes the training
    steps in it, here or there, while the models stay in ``dtype``.
    """
    for name, annotation, value in (
        ("model", nn.Module, model),
        ("evaluate_every", Count, evaluate_every),
        ("metrics", Metrics, metrics),
        ("precision", Precision, precision),
    ):
        check(name, annotation, value)
    numbers = _check_call(algorithm, rounds, seed, cohort, dtype, callbacks)
    carrying: Channel = check("channel", ChosenChannel, channel)
    weighed = {"l2": l2, "l1": l1, "nonconvex": nonconvex, "weights": weights}
    terms = Terms.of({"batch_size": batch_size, "backend": backend, "buffers": buffers, **weighed})
    split = data if isinstance(data, FederatedData) else FederatedData.of_nodes(data)
    chosen_loss = as_loss(loss) if step is None else OwnStep(step)
    setting = Setting(
        data=split,
        test_data=None if test is None else read_test("test", test),
        network=as_network(topology, split.nodes, seed),
        loss=chosen_loss,
        metrics=choose_metrics(metrics, has_test=test is not None, has_accuracy=chosen_loss.has_accuracy),
        make_module=lambda: model,
        terms=terms,
        seed=seed,
        device=str(device),
        dtype=numbers,
        precision=precision,
    )
    name = type(algorithm).__name__
    setting.check(f"{name} on {split.nodes} nodes", algorithm, cohort, carrying)
    if text := convexity_warning(name, algorithm, setting.objective):
        warnings.warn(text, RuntimeWarning, stacklevel=CALLER)
    run = Run(setting.simulation(algorithm, cohort, carrying), rounds, evaluate_every, setting.measure)
    status = _execute(run, seed, callbacks)
    models = run.simulation.models.detach()
    objective = setting.objective
    average = objective.model.module(objective.complete(models.mean(0, keepdim=True))[0])
    return TrainResult(History(run.rows), status, average, models.clone())


@switches_restored()
def minimize(
    functions: Sequence[Callable[[Tensor], Tensor]],
    x0: Tensor | Sequence[float],
    algorithm: Method,
    rounds: int,
    *,
    topology: Topology = "server",
    seed: int = 0,
    cohort: Cohort = "all",
    channel: Channel | str | dict[str, Any] = "identity",
    callbacks: Sequence[Callback] = (),
    dtype: torch.dtype | Literal["float32", "float64"] = "float64",
) -> MinimizeResult:
    """Minimises the mean of ``functions``, one per node, from ``x0`` [d] with exact gradients.

    Each function maps a 1-D tensor to a scalar tensor and is differentiated by torch.
    ``topology``, ``cohort``, ``channel``, ``callbacks``: as for ``train``.
    """
    numbers = _check_call(algorithm, rounds, seed, cohort, dtype, callbacks)
    carrying: Channel = check("channel", ChosenChannel, channel)
    check("functions", Sequence[Callable[..., Any]], functions)
    start = torch.as_tensor(x0, dtype=numbers).detach().clone()
    if start.dim() != 1 or len(start) == 0:
        raise HoldfastError(f"x0: expected a 1-D tensor, got shape {list(start.shape)}")
    if not start.isfinite().all():
        raise HoldfastError(f"x0: expected finite numbers, got {quoted(start.tolist())}")
    problem = FunctionProblem(functions, start)
    network, name = as_network(topology, problem.nodes, seed), type(algorithm).__name__
    check_fit(algorithm, problem.nodes, network, cohort_size(cohort), carrying)
    rows = dry_run(algorithm, network, cohort_size(cohort), channel=carrying)
    needed = rows.memory(problem.nodes, problem.dim, numbers.itemsize)
    needed += (rounds + 1) * problem.nodes * problem.dim * numbers.itemsize
    require_memory(f"the path of {name} on {problem.nodes} nodes", needed)
    simulation = build_simulation(algorithm, problem, network, seed=seed, cohort=cohort, channel=carrying)
    names = ["train_loss", "consensus", "grad_norm2"]
    run = Run(simulation, rounds, 1, lambda now: measure(now, None, names))
    path = _Path(run)
    status = _execute(run, seed, [path, *callbacks])
    return MinimizeResult(History(run.rows), status, torch.stack(path.models))


class _Path(Callback):
    """Keeps the models after every round."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.models: list[Tensor] = []

    def round_done(self, job: JobInfo, round: int) -> None:
        self.models.append(self.run.simulation.models.detach().clone())


def _execute(run: Run, seed: int, callbacks: Sequence[Callback]) -> JobStatus:
    """Runs all rounds; how it ended."""
    name = type(run.simulation.method).__name__
    job = JobInfo(f"{name}-seed{seed}", name, run.rounds)
    with stop_signals(signal.SIGINT) as asked_to_stop:
        outcome = run.execute(job, callbacks, asked_to_stop)
    if outcome.error is not None:
        raise outcome.error
    if outcome.status == "diverged":
        reached = run.simulation.round
        message = f"{name} diverged (a non-finite figure) by round {reached}: try a smaller lr"
        warnings.warn(message, RuntimeWarning, stacklevel=CALLER + 1)
    return outcome.status


def _check_call(
    algorithm: Method, rounds: int, seed: int, cohort: Cohort, dtype: object, callbacks: Sequence[Callback]
) -> torch.dtype:
    """What ``train`` and ``minimize`` are both given; the type of numbers."""
    if not isinstance(algorithm, Method):
        raise HoldfastError(
            f"algorithm: expected one such as holdfast.LocalGECL(lr=0.05), got {quoted(algorithm)}"
        )
    check("rounds", Count, rounds)
    check("seed", Seed, seed)
    check("cohort", Cohort, cohort)
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise HoldfastError(f"callbacks: expected instances of hf.Callback, got {quoted(callback)}")
    known = {"float32": torch.float32, "float64": torch.float64}
    found = known.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in known.values():
        raise HoldfastError(f"dtype: should be torch.float32 or torch.float64, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found
