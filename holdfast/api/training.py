"""``hf.train``: a module on split data."""

from __future__ import annotations

import inspect
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from holdfast.api.calls import CALLER, execute, needs_folder, settled, watchers
from holdfast.api.node_data import NodeData, as_read
from holdfast.api.options import TrainOptions
from holdfast.api.planning import given_plan
from holdfast.api.results import History, TrainResult
from holdfast.channels import Channel
from holdfast.contract import Method
from holdfast.core.errors import unknown
from holdfast.core.precision import Precision, switches_restored
from holdfast.core.validation import Cohort
from holdfast.data import Partitioner
from holdfast.data.test_sets import Tests
from holdfast.experiments.callbacks import Callback
from holdfast.experiments.choices import Named
from holdfast.experiments.config import BatchSize, Cadence, Metrics, Weighting
from holdfast.experiments.execution import Execution, stop_signals
from holdfast.experiments.given import Contender, open_run
from holdfast.experiments.networks import Topology
from holdfast.privacy import DP, NodeDP
from holdfast.problem.augmentation import Augment
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, Step
from holdfast.problem.sampling import SamplingName
from holdfast.problem.statistics import Buffers
from holdfast.robust import Aggregation, Attack


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
    contender, read = Contender.of(algorithm), as_read(data)
    plan = given_plan(
        "hf.train",
        [contender],
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
    average = problem.model.module(problem.evaluation.complete(models.mean(0, keepdim=True))[0])
    statistics = problem.evaluation.complete(own, problem.here)[:, problem.dim :]
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
