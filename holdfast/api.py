"""The Python interface: ``train`` a module on split data, or ``minimize`` given functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast.channels import Channel, ChosenChannel
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, compute_in, switches_restored
from holdfast.core.validation import Count, NonNegative, Seed, check, quoted
from holdfast.data.federated import FederatedData, as_pair, warn_if_random
from holdfast.engines.common.driver import Row, Run
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.executors.rules import executor_for
from holdfast.experiments.metrics import choose_metrics, measure
from holdfast.experiments.setting import torch_device
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES, Loss
from holdfast.problem.model_problem import ModelObjective
from holdfast.problem.problem import FunctionObjective
from holdfast.problem.reference.curvature import why_not_convex
from holdfast.problem.regulariser import Regulariser
from holdfast.topology import Network, build_network, server
from holdfast.topology.graphs import Graph

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Topology = Network | Graph | str | Mapping[str, Any] | None
"""Who talks to whom, as ``train`` and ``minimize`` take it."""

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
class TrainResult:
    """A trained federation."""

    model: nn.Module  # the average of all nodes' models
    models: Tensor  # [n, d]: every node's parameters, flat
    history: History
    diverged: bool


@dataclass(frozen=True)
class MinimizeResult:
    """The path of every node."""

    x: Tensor  # [rounds + 1, n, d]: each node's model after the exchange of each round; fewer if it diverged
    history: History
    diverged: bool


@switches_restored()
def train(
    algorithm: Method,
    *,
    model: nn.Module,
    data: FederatedData | Sequence[Any],
    topology: Topology = None,
    rounds: int,
    batch_size: int | None = 32,
    loss: str | Loss = "cross-entropy",
    test: tuple[Any, Any] | Dataset[Any] | None = None,
    seed: int = 0,
    l2: float = 0.0,
    weights: Literal["uniform", "samples"] = "uniform",
    cohort: int | None = None,
    channel: Channel | str | dict[str, Any] = "identity",
    evaluate_every: int = 1,
    metrics: list[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision = "tf32",
) -> TrainResult:
    """Trains ``model`` with ``algorithm`` on every node's own data, all nodes simulated on one device.

    ``data``: the result of ``holdfast.partition``, or one (x, y) pair or torch Dataset per node.
    ``topology``: a name such as "ring" or "server" (as in an experiment, a dictionary with a name if it takes
    parameters), a graph (mixed with Metropolis weights), a ``Network``, or None for a server.
    ``batch_size``: samples per gradient, drawn with replacement; None takes all of a node's data every time.
    ``l2``: weight of (l2/2)||x||^2 in the objective. ``cohort``: clients sampled per round (server methods).
    ``channel``: how messages travel, such as "half" or ``hf.Half()``.
    ``precision``: of matrix products on a GPU, "tf32" or strict "float32"; "bfloat16" computes the training
    steps in it, here or there, while the models stay in ``dtype``.
    """
    for name, annotation, value in (
        ("model", nn.Module, model),
        ("batch_size", Count | None, batch_size),
        ("loss", str | Loss, loss),
        ("l2", NonNegative, l2),
        ("weights", Literal["uniform", "samples"], weights),
        ("evaluate_every", Count, evaluate_every),
        ("metrics", list[str] | None, metrics),
        ("precision", Precision, precision),
    ):
        check(name, annotation, value)
    _check_call(algorithm, rounds, seed, cohort, dtype)
    chosen_channel: Channel = check("channel", ChosenChannel, channel)
    split = data if isinstance(data, FederatedData) else FederatedData.of_nodes(data)
    chosen_loss = LOSSES.build(loss, {}) if isinstance(loss, str) else loss
    objective = ModelObjective(
        FlatModel(model, torch_device(str(device)), dtype, compute_in(precision)),
        chosen_loss,
        split,
        batch_size=batch_size,
        seed=seed,
        regulariser=Regulariser(l2=l2),
        weights=weights,
    )
    test_set = None
    if test is not None:
        x, y = as_pair("test", test)
        warn_if_random("test", test, (x, y))
        if (x.dtype, y.dtype) != (split.x.dtype, split.y.dtype):
            raise HoldfastError(
                f"test: samples and targets are {x.dtype} and {y.dtype}, for training {split.x.dtype} and "
                f"{split.y.dtype}; convert them"
            )
        test_set = objective.test_set(x, y)
    objective.check_model(test_set)
    names = choose_metrics(metrics, has_test=test_set is not None, has_accuracy=chosen_loss.has_accuracy)
    network = as_network(topology, split.nodes, seed)
    check_fit(algorithm, split.nodes, network, cohort, chosen_channel)
    footprint = dry_run(algorithm, network, cohort, channel=chosen_channel)
    needed = footprint.memory(split.nodes, objective.dim, dtype.itemsize)
    needed += objective.step_bytes
    require_memory(f"{type(algorithm).__name__} on {split.nodes} nodes", needed, str(device))
    executor = executor_for(objective.x0.device)
    options: Any = {"seed": seed, "cohort_size": cohort, "channel": chosen_channel, "executor": executor}
    simulation = Simulation(algorithm, objective, network, **options)
    if algorithm.assumes_convex and (reason := why_not_convex(objective)):
        text = f"{type(algorithm).__name__} promises to converge on convex objectives only, and here {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=CALLER)
    simulation.prepare(rounds)
    run = Run(simulation, rounds, evaluate_every, lambda now: measure(now, test_set, names))
    for _ in run:
        pass
    _warn_if_diverged(run)
    models = simulation.models.detach()
    return TrainResult(
        objective.model.module(models.mean(0)), models.clone(), History(run.rows), run.diverged
    )


@switches_restored()
def minimize(
    functions: Sequence[Callable[[Tensor], Tensor]],
    x0: Tensor | Sequence[float],
    algorithm: Method,
    rounds: int,
    *,
    topology: Topology = None,
    seed: int = 0,
    cohort: int | None = None,
    channel: Channel | str | dict[str, Any] = "identity",
    dtype: torch.dtype = torch.float64,
) -> MinimizeResult:
    """Minimises the mean of ``functions``, one per node, from ``x0`` [d] with exact gradients.

    Each function maps a 1-D tensor to a scalar tensor and is differentiated by torch.
    ``topology`` and ``channel``: as for ``train``.
    """
    _check_call(algorithm, rounds, seed, cohort, dtype)
    check("functions", Sequence[Callable[..., Any]], functions)
    start = torch.as_tensor(x0, dtype=dtype).detach().clone()
    if start.dim() != 1 or len(start) == 0:
        raise HoldfastError(f"x0: expected a 1-D tensor, got shape {list(start.shape)}")
    if not start.isfinite().all():
        raise HoldfastError(f"x0: expected finite numbers, got {quoted(start.tolist())}")
    objective = FunctionObjective(functions, start)
    options: Any = {"seed": seed, "cohort_size": cohort, "channel": check("channel", ChosenChannel, channel)}
    simulation = Simulation(algorithm, objective, as_network(topology, objective.nodes, seed), **options)
    names = ["train_loss", "consensus", "grad_norm2"]
    run = Run(simulation, rounds, 1, lambda now: measure(now, None, names))
    path = [simulation.models.detach().clone() for _ in run]
    _warn_if_diverged(run)
    return MinimizeResult(torch.stack(path), History(run.rows), run.diverged)


def as_network(topology: Topology, nodes: int, seed: int = 0) -> Network:
    """The network of ``nodes`` nodes; a random graph that is chosen by name is drawn from ``seed``."""
    if topology is None:
        return server(nodes)
    if isinstance(topology, Network):
        return topology
    if not isinstance(topology, str | Mapping):
        return Network.of(topology)
    choice = {"name": topology} if isinstance(topology, str) else dict(topology)
    name = choice.pop("name", None)
    if not isinstance(name, str):
        raise HoldfastError(
            f"topology: expected a name among the keys, such as {{'name': 'torus', 'rows': 2}}, got "
            f"{quoted(topology)}"
        )
    return build_network(name, choice, None, {}, nodes, seed)


def _check_call(algorithm: Method, rounds: int, seed: int, cohort: int | None, dtype: torch.dtype) -> None:
    """What ``train`` and ``minimize`` are both given."""
    if not isinstance(algorithm, Method):
        raise HoldfastError(
            f"algorithm: expected one such as holdfast.LocalGECL(lr=0.05), got {quoted(algorithm)}"
        )
    check("rounds", Count, rounds)
    check("seed", Seed, seed)
    check("cohort", Count | None, cohort)
    if dtype not in (torch.float32, torch.float64):
        raise HoldfastError(f"dtype: should be torch.float32 or torch.float64, got {dtype!r}")


def _warn_if_diverged(run: Run) -> None:
    if run.diverged:
        name = type(run.simulation.method).__name__
        message = f"{name} diverged (a non-finite figure) by round {run.simulation.round}: try a smaller lr"
        warnings.warn(message, RuntimeWarning, stacklevel=CALLER + 1)
