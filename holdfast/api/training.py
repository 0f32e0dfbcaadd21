"""``hf.train``: a module on split data."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch

from holdfast.api.results import History, TrainResult
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.precision import switches_restored
from holdfast.core.validation import Seed, check, quoted
from holdfast.data import TrainTest
from holdfast.data.lazy import AnyData
from holdfast.data.per_node import as_data
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.execution import Execution, stop_signals
from holdfast.experiments.growth import grown_loss
from holdfast.experiments.methods import LabelledMethod
from holdfast.experiments.option_forms import Choice, GivenModel, Named
from holdfast.experiments.plan import Plan
from holdfast.experiments.record_files import JobStatus, Outcome
from holdfast.experiments.runner import open_run
from holdfast.experiments.spec import TrainOptions, TrainSpec, check_names, takes_options
from holdfast.report.progress import Progress, somebody_watches

NodeData = AnyData | Sequence[Any] | TrainTest | Named
"""What every node has, as ``hf.train`` takes it, also with a test set, or a name."""

# --- what ``hf.train`` and ``hf.minimize`` share --------------------------------------------------------


CALLER = 3  # stacklevel of the user's line, from inside them: their decorator is between


def execute(run: Execution, job: JobInfo, callbacks: Sequence[Callback]) -> JobStatus:
    """Runs all rounds; how it ended."""
    with stop_signals(signal.SIGINT) as asked_to_stop:
        outcome = run.execute(job, callbacks, asked_to_stop)
    return settled(run, job, outcome, depth=2)


def settled(run: Execution, job: JobInfo, outcome: Outcome, depth: int = 1) -> JobStatus:
    """The status of a job that ended; an error that ended it is raised."""
    if outcome.error is not None:
        raise outcome.error
    if outcome.status == "diverged":
        message = f"{job.title} diverged: {outcome.message}"
        warnings.warn(message, RuntimeWarning, stacklevel=CALLER + depth)
    elif outcome.status == "done" and (growth := grown_loss(run.rows)):
        warnings.warn(f"{job.title}: {growth}; try a smaller lr", RuntimeWarning, stacklevel=CALLER + depth)
    return outcome.status


def watchers(
    callbacks: Sequence[Callback], progress: bool | None, jobs: Sequence[JobInfo], *, leave: bool = True
) -> list[Callback]:
    """The callbacks, checked, with a progress bar over ``jobs`` if it is wanted."""
    check("progress", bool | None, progress)
    if not isinstance(callbacks, Sequence):
        raise HoldfastError(f"callbacks: expected a list such as [hf.Progress()], got {quoted(callbacks)}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise HoldfastError(f"callbacks: expected instances of hf.Callback, got {quoted(callback)}")
    shown = any(isinstance(callback, Progress) for callback in callbacks)
    if shown or not (somebody_watches() if progress is None else progress):
        return list(callbacks)
    return [*callbacks, Progress(jobs, leave=leave)]


def needs_folder(run_dir: str | Path | None, *, resume: bool) -> None:
    """Complains if there is nothing to resume from."""
    check("resume", bool, resume)
    if resume and run_dir is None:
        raise HoldfastError("resume: give the run_dir of the run to go on with")


# --- the jobs of a call from Python, checked ------------------------------------------------------------


def as_read(data: NodeData) -> Any:
    """``data`` of nodes, read or looked at once; a name stays one."""
    if isinstance(data, TrainTest):
        return data._replace(train=as_data(data.train))
    if isinstance(data, Mapping) and "name" not in data:
        raise HoldfastError(
            "data: a dictionary is for data by name, and has a key 'name'; of nodes with names give "
            "hf.from_datasets(list(data.values()), names=list(data))"
        )
    return data if isinstance(data, str | Mapping | Choice) else as_data(data)


def plan_of(
    origin: str,
    methods: Sequence[LabelledMethod],
    seeds: Sequence[int],
    given: Mapping[str, Any],
    *,
    device: str | torch.device,
    data_dir: str | Path | None,
) -> Plan:
    """Every method with every seed, checked; ``given``: the options of ``origin`` by name."""
    check_names(origin, TrainSpec, given, {"seeds", "run_dir"})
    if not isinstance(seeds, Sequence) or not seeds:
        raise HoldfastError(f"seeds: expected a list such as [0, 1, 2] or range(3), got {quoted(seeds)}")
    seeds = [check("seed", Seed, seed) for seed in seeds]
    if len(set(seeds)) < len(seeds):
        raise HoldfastError(f"seeds: each once, got {quoted(seeds)}")
    folder = None if data_dir is None else Path(data_dir)
    plan = Plan.of_call(origin, methods, given, seeds, device=str(device), data_dir=folder)
    plan.check()
    return plan


# --- ``hf.train``: a module on split data ---------------------------------------------------------------


@switches_restored()
@takes_options(TrainSpec)
def train(
    algorithm: Method | Named,
    *,
    model: GivenModel,
    data: NodeData,
    rounds: int,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str | torch.device = "cpu",
    **options: Unpack[TrainOptions],
) -> TrainResult:
    """Trains ``model`` with ``algorithm`` on every node's own data, all nodes simulated on one device.

    ``algorithm``: the method with its hyperparameters, such as ``hf.LocalGECL(lr=0.05, local_steps=8)``.
    ``model``: the module that every node starts from; it is copied, not changed.
    ``data``: the result of ``hf.partition``, ``hf.from_frame`` or ``hf.from_datasets``; an ``hf.Stream``; or,
    for each node, a pair (x, y), a dictionary of tensors or a map-style Dataset (docs/data.md). x may be a
    tensor, a dictionary of the model's keyword arguments or a tuple of its arguments. Or a name, such as
    "digits", which brings its own test set.
    ``rounds``: communication rounds.
    ``seed``: of the minibatches, cohorts and random topologies; the initial weights are the model's own.
    ``callbacks``: what watches the run, such as ``hf.EarlyStopping("train_loss")``; see ``hf.Callback``.
    ``progress``: whether to show a progress bar; by default in a terminal and in a notebook.
    ``run_dir``: a new folder for metrics, checkpoints and models, which ``holdfast report`` understands.
    ``resume``: continue the run in ``run_dir``, if there is one, as if it had never stopped; all other
    arguments must mean the same, except that more ``rounds`` extend it.
    ``data_dir``: where files of data by name are, by default what HOLDFAST_DATA says.
    ``device``: "cpu", "cuda" or "cuda:N".

    The other arguments are the options of a run. They are called as in an experiment file
    (docs/experiments.md). As there, ``algorithm``, ``model``, ``data`` and whatever else can be chosen may be
    names, registered or your own "module:attribute", alone or in a dictionary with parameters, such as
    {"name": "mlp", "hidden": [64]}. None stands for the default.

    {options}

    Returns a ``TrainResult``: ``history`` (metrics by round), ``status``, ``model`` (the average of all
    nodes' models), ``models`` [n, d], ``node_model(i)``, ``plot()``, ``save(path)``. Ctrl-C ends training
    after the round, and the result so far is returned with the status "interrupted".
    """
    needs_folder(run_dir, resume=resume)
    method, read = LabelledMethod.of(algorithm), as_read(data)
    given = {"model": model, "data": read, "rounds": rounds, **options}
    plan = plan_of("hf.train", [method], [seed], given, device=device, data_dir=data_dir)
    for text in plan.warnings():
        warnings.warn(text, RuntimeWarning, stacklevel=CALLER)
    [job] = plan.jobs
    watching = watchers(callbacks, progress, [job.info])
    if run_dir is None:
        run = Execution(plan.simulation(job), job.rounds, job.evaluate_every, plan.setting(job).evaluation)
        status = execute(run, job.info, watching)
    else:
        runner = open_run(plan, Path(run_dir), resume=resume)
        with stop_signals(signal.SIGINT) as asked_to_stop:
            run, outcome = runner.run(job, watching, asked_to_stop)
        status = settled(run, job.info, outcome)
        if status != "interrupted":
            runner.close()
    models, problem = run.simulation.models.detach(), plan.setting(job).problem
    personal = run.simulation.personal_models
    own = models if personal is None else personal.detach()
    average = problem.model.module(problem.tester.complete(models.mean(0, keepdim=True))[0])
    statistics = problem.tester.complete(own, problem.here)[:, problem.dim :]
    ended = (History(run.rows), status, average, own.clone())
    return TrainResult(*ended, problem.model.module, statistics.clone())
