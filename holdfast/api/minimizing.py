"""``hf.minimize``: given functions instead of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from holdfast.api.results import History, MinimizeResult
from holdfast.api.training import execute, watchers
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.precision import switches_restored
from holdfast.core.validation import Count, Seed, check, quoted
from holdfast.engines.common.fit import check_fit
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.choices import as_channel, as_method, network_of
from holdfast.experiments.execution import Execution
from holdfast.experiments.metrics import Evaluation, choose_metrics
from holdfast.experiments.option_forms import GivenChannel, Named, NumberType
from holdfast.experiments.setting import build_simulation
from holdfast.experiments.spec import NetworkOptions, NetworkSpec, check_names, takes_options
from holdfast.problem.problem import FunctionProblem


@switches_restored()
@takes_options(NetworkSpec)
def minimize(
    functions: Sequence[Callable[[Tensor], Tensor]],
    x0: Tensor | Sequence[float],
    algorithm: Method | Named,
    rounds: int,
    *,
    seed: int = 0,
    channel: GivenChannel = "identity",
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    dtype: NumberType = "float64",
    **options: Unpack[NetworkOptions],
) -> MinimizeResult:
    """Minimises the mean of ``functions``, one per node, from ``x0`` [d] with exact gradients.

    ``functions``: each maps a 1-D tensor to a scalar tensor and is differentiated by torch.
    ``x0``: where all nodes start, [d]. ``algorithm``: the method. ``rounds``: for how many rounds it runs.
    ``seed``, ``channel``, ``callbacks`` and ``progress``: as for ``train``.
    ``dtype``: of all numbers, float64 or float32.

    {options}

    Returns a ``MinimizeResult``: ``history``, ``status`` and the path ``x`` [rounds + 1, n, d] of every node.
    """
    check_names("hf.minimize", NetworkSpec, options, {"seed", "channel", "callbacks", "progress", "dtype"})
    numbers = getattr(torch, check("dtype", NumberType, dtype))
    rounds, seed = check("rounds", Count, rounds), check("seed", Seed, seed)
    spec = NetworkSpec.of({name: value for name, value in options.items() if value is not None})
    method, carrying, cohort = as_method(algorithm), as_channel(channel), spec.cohort
    check("functions", Sequence[Callable[..., Any]], functions)
    start = torch.as_tensor(x0, dtype=numbers).detach().clone()
    if start.dim() != 1 or len(start) == 0:
        raise HoldfastError(f"x0: expected a 1-D tensor, got shape {list(start.shape)}")
    if not start.isfinite().all():
        raise HoldfastError(f"x0: expected finite numbers, got {quoted(start.tolist())}")
    problem = FunctionProblem(functions, start)
    network, name = network_of(spec, problem.nodes, seed), type(method).__name__
    found = check_fit(method, problem.nodes, network, cohort, carrying)
    needed = found.footprint(cohort, carrying).memory(problem.nodes, problem.dim, numbers.itemsize)
    needed += (rounds + 1) * problem.nodes * problem.dim * numbers.itemsize
    require_memory(f"the path of {name} on {problem.nodes} nodes", needed)
    place: Any = {"seed": seed, "cohort": cohort, "channel": carrying, "profile": found}
    simulation = build_simulation(method, problem, network, **place)
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
