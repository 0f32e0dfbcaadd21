"""``hf.train``: a module on split data."""

from __future__ import annotations

import inspect
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from holdfast.api.results import History, MinimizeResult, TrainResult
from holdfast.channels import Channel
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, switches_restored
from holdfast.core.validation import Cohort, Count, Seed, Whole, check, quoted
from holdfast.data import NodesData, Partitioner, TrainTest
from holdfast.data.lazy import AnyData
from holdfast.data.per_node import Tests, as_data, read_tests
from holdfast.engines.common.fit import check_fit
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.choices import (
    Named,
    Topology,
    as_augment,
    as_channel,
    as_choice,
    as_loss,
    as_method,
    as_module,
    as_network,
    as_partition,
)
from holdfast.experiments.execution import Execution, stop_signals
from holdfast.experiments.growth import grown_loss
from holdfast.experiments.metrics import Evaluation, choose_metrics
from holdfast.experiments.plan import GivenPlan, LabelledMethod
from holdfast.experiments.record_files import JobStatus, Outcome
from holdfast.experiments.runner import open_run
from holdfast.experiments.setting import Setting, build_simulation, label_table, named_data
from holdfast.experiments.spec import BatchSize, Cadence, Metrics, ProblemConfig, Terms, Weighting
from holdfast.privacy import DP, NodeDP
from holdfast.problem.checks import Augment
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, OwnStep, Step
from holdfast.problem.problem import FunctionProblem
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.report.progress import Progress, somebody_watches
from holdfast.robust import Aggregation, Attack

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


def checked_call(rounds: int, cohort: Cohort) -> tuple[int, Cohort]:
    """What ``train`` and ``minimize`` are both given."""
    return check("rounds", Count, rounds), check("cohort", Cohort, cohort)


def checkpoints_between(given: int | None, run_dir: str | Path | None, rounds: int) -> int:
    """Rounds from one checkpoint to the next; without a ``run_dir``, which goes on, only at the end."""
    return given if given is not None else 50 if run_dir is not None else rounds


def number_type(dtype: object) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64}
    found = known.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in known.values():
        raise HoldfastError(f"dtype: should be torch.float32 or torch.float64, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found


def needs_folder(run_dir: str | Path | None, *, resume: bool) -> None:
    """Complains if there is nothing to resume from."""
    check("resume", bool, resume)
    if resume and run_dir is None:
        raise HoldfastError("resume: give the run_dir of the run to go on with")


# --- the data of ``hf.train``, ``hf.compare`` and ``hf.tune``: of nodes already, or by name -------------


NodeData = AnyData | Sequence[Any] | TrainTest | Named
"""What every node has, as ``hf.train`` takes it, also with a test set, or a name."""


def as_read(data: NodeData) -> AnyData | TrainTest | Named:
    """``data`` of nodes, read or looked at once; a name stays one."""
    if isinstance(data, TrainTest):
        return data._replace(train=as_data(data.train))
    return data if isinstance(data, str | Mapping) else as_data(data)


def nodes_data(
    data: NodeData,
    nodes: int | None,
    partition: Partitioner | Named | None,
    data_dir: str | Path | None,
    test: Tests | None,
    seed: int,
) -> NodesData:
    """``data`` and ``test``, which may come with a name; the arguments are those of ``hf.train``."""
    if not isinstance(data, str | Mapping):
        for name, value in (("nodes", nodes), ("partition", partition), ("data_dir", data_dir)):
            if value is not None:
                raise HoldfastError(
                    f"{name}: only for data by name, such as data='digits'; these are given for each node. "
                    "To divide samples: hf.partition"
                )
        train, own_test = data if isinstance(data, TrainTest) else (data, None)
        return NodesData.of(as_data(train), own_test if test is None else test)
    if isinstance(data, Mapping) and "name" not in data:
        raise HoldfastError(
            "data: a dictionary is for data by name, and has a key 'name'; of nodes with names give "
            "hf.from_datasets(list(data.values()), names=list(data))"
        )
    count = ProblemConfig.model_fields["nodes"].default if nodes is None else check("nodes", Count, nodes)
    folder = None if data_dir is None else Path(data_dir)
    rule = None if partition is None else lambda: as_partition(partition)
    given = named_data(as_choice("data", data), rule, nodes=count, seed=seed, data_dir=folder)
    if test is None:
        return given
    samples, counts = read_tests(test, given.train)
    return replace(given, test=samples, test_counts=counts)


# --- the jobs of a call from Python, checked ------------------------------------------------------------


OF_THIS_MACHINE = ("device", "evaluate_every", "data_dir")  # what a run may be resumed with another of


def given_plan(
    origin: str,
    methods: Sequence[LabelledMethod],
    make_model: Callable[[int], nn.Module | Named],
    make_data: Callable[[int], NodeData],
    *,
    seeds: Sequence[int],
    rounds: int,
    checkpoint_every: int,
    options: dict[str, Any],
) -> GivenPlan:
    """Every method with every seed, checked; ``make_model`` and ``make_data`` are called with a seed.

    ``options``: all arguments of ``hf.train`` that ``TrainOptions`` names.
    """
    rounds, cohort = checked_call(rounds, options["cohort"])
    if not isinstance(seeds, Sequence) or not seeds:
        raise HoldfastError(f"seeds: expected a list such as [0, 1, 2] or range(3), got {quoted(seeds)}")
    seeds = [check("seed", Seed, seed) for seed in seeds]
    if len(set(seeds)) < len(seeds):
        raise HoldfastError(f"seeds: each once, got {quoted(seeds)}")
    checkpoint_every = check("checkpoint_every", Count, checkpoint_every)

    def make_setting(seed: int) -> Setting:
        return _setting(make_model(seed), make_data(seed), seed, **options)

    plan = GivenPlan(
        origin=origin,
        name=origin.removeprefix("hf."),
        methods=methods,
        seeds=seeds,
        rounds=rounds,
        evaluate_every=check("evaluate_every", Cadence, options["evaluate_every"]),
        checkpoint_every=checkpoint_every,
        make_setting=make_setting,
        arguments=lambda: {
            "algorithm": methods,
            "model": make_model(seeds[0]),
            "data": make_data(seeds[0]),
            **{name: value for name, value in options.items() if name not in OF_THIS_MACHINE},
        },
        device=str(options["device"]),
        cohort=cohort,
        channel=as_channel(options["channel"]),
        local_epochs=check("local_epochs", Count | None, options["local_epochs"]),
    )
    plan.check()
    return plan


def _setting(
    model: nn.Module | Named,
    data: NodeData,
    seed: int,
    *,
    nodes: int | None,
    partition: Partitioner | Named | None,
    data_dir: str | Path | None,
    topology: Topology,
    batch_size: BatchSize,
    sampling: SamplingName,
    augment: Augment | str | None,
    loss: Loss | LossFunction | Named,
    step: Step | None,
    test: Tests | None,
    l2: float,
    l1: float,
    nonconvex: float,
    weights: Weighting,
    private: DP | NodeDP | None,
    backend: BackendName,
    buffers: Buffers,
    aggregation: Aggregation | Named | None,
    attack: Attack | Named | None,
    evaluate_every: Cadence,
    metrics: Any,
    personalize: int,
    device: str | torch.device,
    dtype: torch.dtype | Literal["float32", "float64"],
    precision: Precision,
    **of_methods: Any,
) -> Setting:
    """What all methods meet alike; the arguments are those of ``train``."""
    for name, annotation, value in (
        ("evaluate_every", Cadence, evaluate_every),
        ("personalize", Whole, personalize),
        ("precision", Precision, precision),
    ):
        check(name, annotation, value)
    wanted: Metrics = check("metrics", Metrics, metrics)
    numbers = number_type(dtype)
    weighed: dict[str, Any] = {"l2": l2, "l1": l1, "nonconvex": nonconvex, "weights": weights}
    weighed["private"] = private
    computed = {"backend": backend, "buffers": buffers}
    terms = Terms.of({"batch_size": batch_size, "sampling": sampling, **computed, **weighed})
    if step is not None and loss != "cross-entropy":
        raise HoldfastError("step: it computes the loss itself; leave loss= out, or step=")
    chosen_loss = as_loss(loss) if step is None else OwnStep(step)
    given = nodes_data(data, nodes, partition, data_dir, test, seed).that_count(chosen_loss.counted)
    split = given.train
    module = as_module(model, split, given.classes, chosen_loss, seed)
    return Setting(
        data=split,
        test_data=given.test,
        test_counts=given.test_counts,
        network=as_network(topology, split.nodes, seed, aggregation, attack),
        loss=chosen_loss,
        wanted=wanted,
        classes=given.classes or 0,
        personalize=personalize,
        make_module=lambda: module,
        augment=as_augment(augment),
        terms=terms,
        seed=seed,
        device=str(device),
        dtype=numbers,
        precision=precision,
        mean=given.mean,
        std=given.std,
        labels=label_table(split, given.classes),
    )


# --- ``hf.minimize``: given functions instead of data ---------------------------------------------------


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
    found = check_fit(method, problem.nodes, network, cohort, carrying)
    needed = found.footprint(cohort, carrying).memory(problem.nodes, problem.dim, numbers.itemsize)
    needed += (rounds + 1) * problem.nodes * problem.dim * numbers.itemsize
    require_memory(f"the path of {name} on {problem.nodes} nodes", needed)
    options: Any = {"seed": seed, "cohort": cohort, "channel": carrying, "profile": found}
    simulation = build_simulation(method, problem, network, **options)
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


# --- the arguments of ``hf.train`` that ``hf.compare`` and ``hf.tune`` pass on --------------------------


class TrainOptions(TypedDict, total=False):
    """As in ``hf.train``, with its defaults."""

    nodes: int | None
    partition: Partitioner | Named | None
    data_dir: str | Path | None
    topology: Topology
    local_epochs: int | None
    batch_size: BatchSize
    sampling: SamplingName
    augment: Augment | str | None
    loss: Loss | LossFunction | Named
    step: Step | None
    test: Tests | None
    l2: float
    l1: float
    nonconvex: float
    weights: Weighting
    private: DP | NodeDP | None
    backend: BackendName
    buffers: Buffers
    aggregation: Aggregation | Named | None
    attack: Attack | Named | None
    cohort: Cohort
    channel: Channel | Named
    evaluate_every: Cadence
    metrics: Metrics | dict[str, Any] | tuple[str | dict[str, Any], ...]
    personalize: int
    device: str | torch.device
    dtype: torch.dtype | Literal["float32", "float64"]
    precision: Precision


# --- ``hf.train``: a module on split data ---------------------------------------------------------------


@switches_restored()
def train(
    algorithm: Method | Named,
    *,
    model: nn.Module | Named,
    data: NodeData,
    nodes: int | None = None,
    partition: Partitioner | Named | None = None,
    data_dir: str | Path | None = None,
    topology: Topology = "server",
    rounds: int,
    local_epochs: int | None = None,
    batch_size: BatchSize = 32,
    sampling: SamplingName = "replacement",
    augment: Augment | str | None = None,
    loss: Loss | LossFunction | Named = "cross-entropy",
    step: Step | None = None,
    test: Tests | None = None,
    seed: int = 0,
    l2: float = 0.0,
    l1: float = 0.0,
    nonconvex: float = 0.0,
    weights: Weighting = "uniform",
    private: DP | NodeDP | None = None,
    backend: BackendName = "auto",
    buffers: Buffers = "local",
    aggregation: Aggregation | Named | None = None,
    attack: Attack | Named | None = None,
    cohort: Cohort = "all",
    channel: Channel | Named = "identity",
    evaluate_every: Cadence = "auto",
    metrics: Metrics | dict[str, Any] | tuple[str | dict[str, Any], ...] = ("default", "minibatch_loss"),
    personalize: int = 0,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 50,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | Literal["float32", "float64"] = "float32",
    precision: Precision = "tf32",
) -> TrainResult:
    """Trains ``model`` with ``algorithm`` on every node's own data, all nodes simulated on one device.

    Arguments are called as in an experiment file (docs/experiments.md). As there, ``algorithm``, ``model``,
    ``data``, ``loss`` and ``channel`` may be names, registered or your own "module:attribute". Parameters
    stand beside the name in a dictionary, such as {"name": "mlp", "hidden": [64]}.

    ``algorithm``: the method with its hyperparameters, such as ``hf.LocalGECL(lr=0.05, local_steps=8)``.
    ``model``: the module that every node starts from; it is copied, not changed.
    ``data``: the result of ``hf.partition``, ``hf.from_frame`` or ``hf.from_datasets``; an ``hf.Stream``; or,
    for each node, a pair (x, y), a dictionary of tensors or a map-style Dataset (docs/data.md). x may be a
    tensor, a dictionary of the model's keyword arguments or a tuple of its arguments. Or a name, such as
    "digits", which brings its own test set; then these three count, too:
    ``nodes``: how many (10). ``partition``: how they share the samples, such as ``hf.Dirichlet(0.1)`` or
    "iid", the default. ``data_dir``: where files are, by default what HOLDFAST_DATA says.
    ``loss``: a name such as "cross-entropy" or "mse", or a function of outputs and targets that gives a mean
    over the batch or a number for each sample, such as ``nn.CrossEntropyLoss(weight=...)``.
    ``step``: instead of a loss, ``step(model, batch)`` computes the loss of a batch, whose form is that of
    ``data``: ``step=lambda model, batch: model(**batch).loss``.
    ``test``: samples like a node's that all models are tested on, or a list with a set for each node; of data
    from a frame also a frame or CSV file, which is read like them.
    ``topology``: a name such as "ring" or "server" (as in an experiment, a dictionary with a name if it takes
    parameters), a graph (mixed with Metropolis weights), or a ``Network``.
    ``rounds``: communication rounds.
    ``local_epochs``: instead of ``local_steps`` of the algorithm, so many passes over a node's data in a
    round. All nodes take as many steps: where they have different numbers of samples, the mean of what each
    would need, rounded up, and a warning says how often each passes over its data (docs/data.md).
    ``batch_size``: samples per gradient; "full" takes all of a node's data. An ``hf.Stream`` has its own.
    ``sampling``: "replacement"; "epochs", every sample once before any is taken again, anew in every round;
    or "poisson", each sample with probability batch_size / N_i.
    ``augment``: ``augment(samples, key)`` changes a node's minibatch on the device, drawing from ``key`` by
    ``hf.random_uniform`` and ``hf.random_normal``; metrics read the samples as they are.
    ``seed``: of the minibatches, cohorts and random topologies; the initial weights are the model's own.
    ``l2``, ``l1``, ``nonconvex``: weights of (l2/2)||x||^2, ||x||_1 and sum x^2/(1 + x^2) in the objective.
    ``weights``: whether nodes count alike ("uniform") or samples do ("samples").
    ``private``: differential privacy of every sample, such as ``hf.DP(epsilon=2, delta=1e-5, clip=1.0)``, for
    ``sampling="poisson"`` or ``batch_size="full"``; or of every node, ``hf.NodeDP(...)``, for methods that a
    server leads; see docs/privacy.md.
    ``backend``: how gradients are computed, all nodes "stacked" in one call, in a "loop" over the nodes, or
    as "adapters" with the frozen part of the model run once over all nodes' batches; "auto" chooses by what
    is trained and how fast its layers are.
    ``buffers``: the running statistics of BatchNorm that a node's model is tested with: of its own data,
    "local", or the "average" over all nodes, which ``result.model`` has in any case.
    ``aggregation``: how nodes, or the server, put messages together, such as ``hf.TrimmedMean(2)``; by
    default the weighted mean. ``attack``: what some nodes send in place of their messages, such as
    ``hf.SignFlip([0, 3])``; figures are then about the others. See docs/robust.md.
    ``cohort``: clients sampled per round (server methods), or "all".
    ``channel``: how messages travel, such as "half" or ``hf.Half()``.
    ``evaluate_every``: rounds between measurements; "auto" chooses them so that measuring costs at most a
    fifth of training, counted in samples. The initial and the last models are always measured.
    ``metrics``: their names; "default" are all that are cheap. "minibatch_loss" is free. A dictionary has
    your own: functions of (outputs, targets) or objects of torchmetrics; see docs/experiments.md.
    ``personalize``: so many local steps from the common model make a node's personal one, for the metrics
    "personal_accuracy" and the like.
    ``callbacks``: who watches, such as ``hf.EarlyStopping("train_loss")``; see ``hf.Callback``.
    ``progress``: whether to show a progress bar; by default in a terminal and in a notebook.
    ``run_dir``: a new folder for metrics, checkpoints and models, which ``holdfast report`` understands.
    ``resume``: go on with the run in ``run_dir``, if there is one, as if it had never stopped; all other
    arguments must be the same, except that more ``rounds`` extend it.
    ``checkpoint_every``: rounds from one checkpoint in ``run_dir`` to the next.
    ``device``: "cpu", "cuda" or "cuda:N". ``dtype``: of the models, float32 or float64.
    ``precision``: of matrix products on a GPU, "tf32" or strict "float32"; "bfloat16" computes the training
    steps in it, here or there, while the models stay in ``dtype``.

    Returns a ``TrainResult``: ``history`` (metrics by round), ``status``, ``model`` (the average of all
    nodes' models), ``models`` [n, d], ``node_model(i)``, ``plot()``, ``save(path)``. Ctrl-C ends training
    after the round, and the result so far is returned with the status "interrupted".
    """
    needs_folder(run_dir, resume=resume)
    options: TrainOptions = {
        "nodes": nodes,
        "partition": partition,
        "data_dir": data_dir,
        "topology": topology,
        "local_epochs": local_epochs,
        "batch_size": batch_size,
        "sampling": sampling,
        "augment": augment,
        "loss": loss,
        "step": step,
        "test": test,
        "l2": l2,
        "l1": l1,
        "nonconvex": nonconvex,
        "weights": weights,
        "private": private,
        "backend": backend,
        "buffers": buffers,
        "aggregation": aggregation,
        "attack": attack,
        "cohort": cohort,
        "channel": channel,
        "evaluate_every": evaluate_every,
        "metrics": metrics,
        "personalize": personalize,
        "device": device,
        "dtype": dtype,
        "precision": precision,
    }
    labelled, read = LabelledMethod.of(algorithm), as_read(data)
    plan = given_plan(
        "hf.train",
        [labelled],
        lambda seed: model,
        lambda seed: read,
        seeds=[seed],
        rounds=rounds,
        checkpoint_every=checkpoint_every,
        options=dict(options),
    )
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


TRAIN_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(train).parameters.items()
    if name in TrainOptions.__annotations__
}


def completed(origin: str, options: TrainOptions) -> dict[str, Any]:
    """``options`` with the defaults of ``train``; ``origin``: who was given them."""
    for name in options:
        if name not in TRAIN_DEFAULTS:
            raise unknown(f"argument of {origin}", name, {*TRAIN_DEFAULTS, "seeds", "rounds", "run_dir"})
    return {**TRAIN_DEFAULTS, **options}
