"""The assembly line: what runs from Python, a file, on a cluster or at a site is built and checked here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, compute_in
from holdfast.core.tree import tree_map
from holdfast.core.validation import Cohort
from holdfast.core.world import ALONE, World
from holdfast.data.lazy import AnyData
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.dry_run import Footprint, dry_run
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.place import HERE
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.executors.rules import executor_for
from holdfast.experiments.choices import Named, as_loss
from holdfast.experiments.config import BatchSize, Metrics, Terms, Weighting
from holdfast.experiments.epochs import LocalEpochs
from holdfast.experiments.evaluation import Evaluation
from holdfast.experiments.measured import HeldOut
from holdfast.experiments.metric_choice import choose_metrics
from holdfast.experiments.metrics import Metric
from holdfast.experiments.networks import poisoned
from holdfast.experiments.protecting import check_private, planned_ledger, protected
from holdfast.privacy import Ledger
from holdfast.problem.augmentation import Augment
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, OwnStep, Step
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.problem import Problem
from holdfast.problem.reference.curvature import why_not_convex
from holdfast.problem.regulariser import Regulariser
from holdfast.problem.sampling import SamplingName
from holdfast.problem.source import MOST_READY
from holdfast.problem.statistics import Buffers
from holdfast.topology import Network

# --- builders ----------------------------------------------------------------------------------------------


def torch_device(name: str) -> torch.device:
    """The device called ``name``, if this machine has it."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise HoldfastError(f"device: should be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise HoldfastError(f"device: {name!r} was asked for, but torch sees {count} GPUs here; use 'cpu'")
    return device


def build_problem(
    model: nn.Module,
    data: AnyData,
    *,
    loss: Loss | LossFunction | Named = "cross-entropy",
    step: Step | None = None,
    batch_size: BatchSize = 32,
    sampling: SamplingName = "replacement",
    augment: Augment | None = None,
    l2: float = 0.0,
    l1: float = 0.0,
    nonconvex: float = 0.0,
    weights: Weighting = "uniform",
    backend: BackendName = "auto",
    buffers: Buffers = "local",
    seed: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision | None = "tf32",
) -> ModelProblem:
    """The nodes' local objectives: ``model`` with ``loss`` on the samples of each, and a regulariser.

    Arguments are those of ``hf.train``; samples enter the model as (x - mean)/std. ``precision``: see
    ``compute_in``, which sets switches of torch; None leaves them as they are.
    """
    compute_dtype = None if precision is None else compute_in(precision)
    return ModelProblem(
        FlatModel(model, torch_device(device), dtype, compute_dtype),
        as_loss(loss) if step is None else OwnStep(step),
        data,
        batch_size=None if batch_size == "full" else batch_size,
        sampling=sampling,
        augment=augment,
        seed=seed,
        regulariser=Regulariser(l2=l2, l1=l1, nonconvex=nonconvex),
        weights=weights,
        backend=backend,
        buffers=buffers,
        mean=mean,
        std=std,
    )


def build_simulation(
    method: Method,
    problem: Problem,
    network: Network,
    *,
    seed: int = 0,
    cohort: Cohort = "all",
    channel: Channel = IDENTITY,
    world: World = ALONE,
    ledger: Ledger | None = None,
) -> Simulation:
    """The method on the problem, ready to run, with the executor of its device."""
    place = RankPlace(world, network) if isinstance(world, Ranks) else HERE
    return Simulation(
        method,
        problem,
        network,
        seed=seed,
        cohort=cohort,
        channel=channel,
        place=place,
        executor=executor_for(problem.x0.device),
        ledger=ledger,
    )


# --- checks ------------------------------------------------------------------------------------------------


def convexity_warning(title: str, method: Method, problem: Problem) -> str | None:
    """What to tell the user of a method whose promises need a convex problem, if this one is not."""
    if not method.assumes_convex or (reason := why_not_convex(problem)) is None:
        return None
    return f"{title} promises to converge on convex objectives only, and here {reason}"


@dataclass(frozen=True)
class Setting:
    """What all methods meet alike for one seed: data, network, problem. The model is made when needed."""

    data: AnyData
    test_data: Any  # a tree of samples, such as a pair (x, y); None: no test set
    network: Network
    loss: Loss
    wanted: Metrics  # what is to be measured
    make_module: Callable[[], nn.Module]
    terms: Terms
    seed: int
    device: str
    dtype: torch.dtype
    precision: Precision
    mean: float = 0.0  # samples enter the model as (x - mean)/std
    std: float = 1.0
    augment: Augment | None = None  # what is done to minibatches on the device
    on_meta: bool = False  # whether ``make_module`` works on torch's device "meta", without any memory
    # [n, classes] int64: samples of each class at each node; no column if there are no classes
    labels: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    world: World = ALONE
    classes: int = 0  # in class labels; 0 if that is not known
    test_counts: list[int] | None = None  # test samples of each node, if they have their own
    personalize: int = 0  # local steps that make a node's model its own, for personal metrics

    @cached_property
    def dim(self) -> int:
        """Number of trainable parameters, counted before there are any if that is possible."""
        if not self.on_meta:
            return self.problem.dim
        with torch.device("meta"):
            module = self.make_module()
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    @cached_property
    def problem(self) -> ModelProblem:
        """The nodes' local objectives, all from the same initial model."""
        return build_problem(
            self.make_module(),
            poisoned(self.data, self.network.attack, self.classes),
            loss=self.loss,
            **self.terms.options,
            augment=self.augment,
            seed=self.seed,
            mean=self.mean,
            std=self.std,
            device=self.device,
            dtype=self.dtype,
            precision=self.precision,
        )

    @cached_property
    def test(self) -> HeldOut | None:
        """The test set, if there is one, where the objective computes."""
        if self.test_data is None:
            return None
        common = self.problem.test_set(self.test_data)
        if self.test_counts is None:
            return HeldOut(common)
        ends = np.cumsum(self.test_counts).tolist()
        own = [
            tree_map(lambda part, a=a, b=b: part[a:b], common)
            for a, b in zip([0, *ends[:-1]], ends, strict=True)
        ]
        return HeldOut(common, own)

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """What is measured, column by column."""
        # Whether a user's loss has an accuracy is known when the model was tried with it.
        loss = self.tried.loss if self.loss.accuracy_by_trial else self.loss
        return choose_metrics(
            self.wanted,
            has_test=self.test_data is not None,
            classes=self.classes if loss.has_accuracy else None,
            nodes=self.data.nodes,
            finite=self.data.finite,
        )

    @cached_property
    def tried(self) -> ModelProblem:
        """The problem, after its model was tried on samples and the loss on their targets."""
        self.problem.check_model(None if self.test is None else self.test.common)
        return self.problem

    @property
    def evaluation(self) -> Evaluation:
        """What is measured of a simulation in this setting."""
        return Evaluation(self.metrics, self.test, self.personalize)

    def local_epochs(self, epochs: int) -> LocalEpochs:
        """So many passes over the nodes' data, for a method."""
        return LocalEpochs(epochs, self.data.counts, self.terms.batch_size)

    def fitted(self, method: Method, local_epochs: int | None) -> Method:
        """``method`` with what depends on data and model: steps of epochs, parts of the model by name."""
        if local_epochs is not None:
            method = self.local_epochs(local_epochs).of(method)
        model = self.problem.model if method.names_parts else None
        return method if model is None else method.for_model(model.numbers)

    def simulation(
        self,
        method: Method,
        cohort: Cohort,
        channel: Channel = IDENTITY,
        *,
        rounds: int,
        noiseless: bool = False,
    ) -> Simulation:
        """The method in this setting, ready to run; how many ``rounds`` are planned decides on the noise.

        ``noiseless``: a run with privacy of samples only clips; an audit compares with that.
        """
        compute_in(self.precision)  # jobs before may have been computed in another
        ledger = planned_ledger(self, method, cohort, rounds)
        method, problem = protected(self, method, cohort, ledger, noiseless=noiseless)
        options: Any = {"seed": self.seed, "cohort": cohort, "channel": channel, "world": self.world}
        return build_simulation(method, problem, self.network, **options, ledger=ledger)

    def check(self, title: str, method: Method, cohort: Cohort, channel: Channel = IDENTITY) -> None:
        """Refuses a method or channel unfit for the network, and what is too large for memory or model."""
        if self.world.size > 1 and not self.network.trusting:
            raise HoldfastError(
                "aggregation, attack: a rule sees a node's incoming messages one by one, and processes "
                "send each other sums; run it in one process, without --processes"
            )
        check_fit(method, self.data.nodes, self.network, cohort, channel)
        check_private(self, method, cohort, channel)
        rows = self.memory(dry_run(method, self.network, cohort, channel=channel))
        if self.device == "cpu":
            rows -= self.data.bytes_everywhere  # which are there already
        ranks = self.world.on_this_machine if self.device == "cpu" else 1
        # In two steps: a model that is far too large is not even made.
        needed = rows * ranks / self.world.size
        require_memory(title, needed, self.device)
        require_memory(title, needed + self.tried.step_bytes * ranks, self.device)
        _ = self.metrics  # refuses what cannot be measured

    def memory(self, footprint: Footprint) -> int:
        """Estimated bytes of all rows of a method and of the data, without activations."""
        prepared = self.data.numbers_everywhere * self.dtype.itemsize
        full_batch = self.terms.batch_size == "full" and self.device == "cpu" and prepared <= MOST_READY
        rows = footprint.memory(self.data.nodes, self.dim, self.dtype.itemsize)
        return int(rows + self.data.bytes_everywhere + (prepared if full_batch else 0))
