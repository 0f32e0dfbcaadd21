"""``hf.minimize``: given functions instead of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from holdfast.api.calls import checked_call, execute, number_type, watchers
from holdfast.api.results import History, MinimizeResult
from holdfast.channels import Channel
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.precision import switches_restored
from holdfast.core.validation import Cohort, Seed, check, quoted
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.experiments.assembly import build_simulation
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.choices import Named, as_channel, as_method
from holdfast.experiments.evaluation import Evaluation
from holdfast.experiments.execution import Execution
from holdfast.experiments.metric_choice import choose_metrics
from holdfast.experiments.networks import Topology, as_network
from holdfast.problem.problem import FunctionProblem
from holdfast.robust import Aggregation, Attack


@switches_restored()
def minimize(
    functions: Sequence[Callable[[Tensor], Tensor]],
    x0: Tensor | Sequence[float],
    algorithm: Method | Named,
    rounds: int,
    *,
    topology: Topology = "server",
    seed: int = 0,
    aggregation: Aggregation | Named | None = None,
    attack: Attack | Named | None = None,
    cohort: Cohort = "all",
    channel: Channel | Named = "identity",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    dtype: torch.dtype | Literal["float32", "float64"] = "float64",
) -> MinimizeResult:
    """Minimises the mean of ``functions``, one per node, from ``x0`` [d] with exact gradients.

    ``functions``: each maps a 1-D tensor to a scalar tensor and is differentiated by torch.
    ``x0``: where all nodes start, [d]. ``algorithm``: the method. ``rounds``: for how many rounds it runs.
    ``topology``, ``seed``, ``aggregation``, ``attack``, ``cohort``, ``channel``, ``callbacks`` and
    ``progress``: as for ``train``.
    ``dtype``: of all numbers, float64 or float32.

    Returns a ``MinimizeResult``: ``history``, ``status`` and the path ``x`` [rounds + 1, n, d] of every node.
    """
    numbers = number_type(dtype)
    rounds, cohort = checked_call(rounds, cohort)
    seed = check("seed", Seed, seed)
    method, carrying = as_method(algorithm), as_channel(channel)
    check("functions", Sequence[Callable[..., Any]], functions)
    start = torch.as_tensor(x0, dtype=numbers).detach().clone()
    if start.dim() != 1 or len(start) == 0:
        raise HoldfastError(f"x0: expected a 1-D tensor, got shape {list(start.shape)}")
    if not start.isfinite().all():
        raise HoldfastError(f"x0: expected finite numbers, got {quoted(start.tolist())}")
    problem = FunctionProblem(functions, start)
    network, name = as_network(topology, problem.nodes, seed, aggregation, attack), type(method).__name__
    check_fit(method, problem.nodes, network, cohort, carrying)
    rows = dry_run(method, network, cohort, channel=carrying)
    needed = rows.memory(problem.nodes, problem.dim, numbers.itemsize)
    needed += (rounds + 1) * problem.nodes * problem.dim * numbers.itemsize
    require_memory(f"the path of {name} on {problem.nodes} nodes", needed)
    simulation = build_simulation(method, problem, network, seed=seed, cohort=cohort, channel=carrying)
    figures = choose_metrics(["train_loss", "consensus", "grad_norm2"], has_test=False, classes=None)
    run = Execution(simulation, rounds, 1, Evaluation(figures))
    path, job = _Path(run), JobInfo(f"{name}-seed{seed}", name, rounds)
    status = execute(run, job, [path, *watchers(callbacks, progress, [job])])
    return MinimizeResult(History(run.rows), status, torch.stack(path.models))


class _Path(Callback):
    """Keeps the models after every round."""

    def __init__(self, run: Execution) -> None:
        self.run = run
        self.models: list[Tensor] = []

    def on_round(self, job: JobInfo, round: int) -> None:
        self.models.append(self.run.simulation.models.detach().clone())
