"""From a checked experiment and a seed to what the assembly line needs: data, model, network, method."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from holdfast.algorithms.load import algorithm_class, build_algorithm, own_parts
from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, compute_in
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Cohort, parameters
from holdfast.core.validation import parameters as accepted_parameters
from holdfast.core.world import ALONE, World
from holdfast.data import (
    PARTITIONERS,
    Dataset,
    FederatedData,
    NodesData,
    Partitioner,
    TrainTest,
    divide,
    load_data,
)
from holdfast.data.lazy import AnyData
from holdfast.engines.cluster.exchange import place
from holdfast.engines.cluster.place import RankPlace
from holdfast.engines.cluster.ranks import Ranks
from holdfast.engines.common.counters import Footprint
from holdfast.engines.common.fit import check_fit
from holdfast.engines.common.peers import HERE
from holdfast.engines.common.profile import Profile
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.experiments.choices import (
    Named,
    as_augment,
    as_loss,
    configured_network,
    initial_module,
    outputs_for,
    poisoned,
)
from holdfast.experiments.metrics import Evaluation, Metric, choose_metrics
from holdfast.experiments.model_figures import HeldOut
from holdfast.experiments.private_runs import check_private, planned_ledger, protected
from holdfast.experiments.spec import BatchSize, Choice, Experiment, Metrics, ProblemConfig, Terms, Weighting
from holdfast.privacy import Ledger
from holdfast.problem.checks import Augment
from holdfast.problem.curvature import estimate_curvature, why_not_convex
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.backend import BackendName
from holdfast.problem.losses import Loss, LossFunction, OwnStep, Step
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.problem import Problem
from holdfast.problem.sampling import SamplingName
from holdfast.problem.source import MOST_READY
from holdfast.problem.statistics import Buffers
from holdfast.topology import Network

# --- ``local_epochs``: a method's local steps, counted in passes over the nodes' data -------------------


Counts = np.ndarray | Sequence[int]


@dataclass(frozen=True)
class LocalEpochs:
    """So many ``epochs`` of nodes with ``counts`` [n] samples.

    All nodes take as many steps in a round: the mean over nodes of what their own epochs take, rounded up.
    Where they have as many samples, that is the same number for each.
    """

    epochs: int
    counts: Counts
    batch_size: int | Literal["full"]

    @property
    def of_nodes(self) -> list[int]:
        """[n]: the steps of one epoch of each node."""
        if self.batch_size == "full":
            return [1] * len(self.counts)
        return [-(-int(count) // self.batch_size) for count in self.counts]

    @property
    def steps(self) -> int:
        """Local steps of every node in a round."""
        return ceil(self.epochs * Fraction(sum(self.of_nodes), len(self.counts)))

    @property
    def note(self) -> str | None:
        """What is worth knowing where nodes differ: how often each passes over its data."""
        own = self.of_nodes
        if min(own) == max(own):
            return None
        least, most = self.steps / max(own), self.steps / min(own)
        return (
            f"local_epochs = {self.epochs}: all nodes take {self.steps} local steps in a round, the mean of "
            f"what their own epochs take. So the largest passes over its data {least:.2g} times, and the "
            f"smallest {most:.2g} times"
        )

    def of(self, method: Method) -> Method:
        """``method`` with that many local steps."""
        name = type(method).__name__
        known = parameters(type(method)).get("local_steps")
        if known is None:
            raise HoldfastError(f"local_epochs: {name} takes no local_steps, so leave it out")
        if not all(self.counts):
            raise HoldfastError("local_epochs: it is not known how many samples nodes have; give local_steps")
        if vars(method)["local_steps"] != known.default:
            raise HoldfastError(f"local_epochs: {name} has local_steps already; give one of them")
        changed: dict[str, Any] = {"local_steps": self.steps}
        return replace(method, **changed)


# --- the assembly line ----------------------------------------------------------------------------------


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
    profile: Profile | None = None,
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
        profile=profile,
    )


# --- checks ------------------------------------------------------------------------------------------------


def convexity_warning(title: str, method: Method, problem: Problem) -> str | None:
    """What to tell the user of a method whose promises need a convex problem, if this one is not."""
    if not method.capabilities.assumes_convex or (reason := why_not_convex(problem)) is None:
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
    # Of methods that were checked, by their ``id``; each profile holds its method, so these stay theirs.
    profiles: dict[int, Profile] = field(default_factory=dict, repr=False, compare=False)

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
        found = self.profiles.get(id(method))
        ledger = planned_ledger(self, method, cohort, rounds, found)
        given, (method, problem) = method, protected(self, method, cohort, ledger, noiseless=noiseless)
        options: Any = {"seed": self.seed, "cohort": cohort, "channel": channel, "world": self.world}
        options["profile"] = found if method is given else None
        return build_simulation(method, problem, self.network, **options, ledger=ledger)

    def check(self, title: str, method: Method, cohort: Cohort, channel: Channel = IDENTITY) -> None:
        """Refuses a method or channel unfit for the network, and what is too large for memory or model."""
        if self.world.size > 1 and not self.network.trusting:
            raise HoldfastError(
                "aggregation, attack: a rule sees a node's incoming messages one by one, and processes "
                "send each other sums; run it in one process, without --processes"
            )
        known = self.profiles.get(id(method))
        found = check_fit(method, self.data.nodes, self.network, cohort, channel, known)
        self.profiles[id(method)] = found
        check_private(self, method, cohort, channel)
        rows = self.memory(found.footprint(cohort, channel))
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


# --- from a checked experiment and a seed to what the assembly line needs -------------------------------


MOST_CLASSES = 1000  # that a report shows


def build_method(experiment: Experiment, setting: Setting) -> Method:
    """The experiment's algorithm, its hyperparameters checked."""
    return setting.fitted(_given_method(experiment, setting), experiment.algorithm.local_epochs)


def _given_method(experiment: Experiment, setting: Setting) -> Method:
    name, parameters = experiment.algorithm.name, experiment.algorithm.parameters
    if experiment.algorithm.curvature == "given":
        return build_algorithm(name, parameters)
    maker: type[Method] = algorithm_class(name)
    if not maker.declared.uses_curvature:
        raise HoldfastError(f"algorithm.curvature: {name!r} does not use the curvature; leave it out")
    for key in parameters:
        if key not in accepted_parameters(maker):
            raise unknown(f"key in algorithm {name!r}", key, accepted_parameters(maker))
    if setting.terms.private is not None:
        raise HoldfastError(
            "algorithm.curvature: it would be measured on private data; give the parameters themselves"
        )
    curvature = estimate_curvature(setting.problem, setting.world)
    return maker.for_problem(curvature.mu, curvature.L, **own_parts(parameters))


def build_setting(
    experiment: Experiment, seed: int, data_dir: Path | None, device: str, world: World = ALONE
) -> Setting:
    """Loads, splits and checks everything but the model; the same for every algorithm.

    A process of several keeps the samples of its own nodes only.
    """
    problem = experiment.problem
    rule = partition_rule(problem.partition)
    given = named_data(problem.dataset, rule, nodes=problem.nodes, seed=seed, data_dir=data_dir)
    loss = as_loss(problem.loss)
    given = given.that_count(loss.counted)
    data = given.train
    network = configured_network(experiment.network, problem.nodes, seed)
    labels = label_table(data, given.classes)
    module = (problem.model, data.input_shape, outputs_for(loss, data, given.classes), seed)
    if world.size > 1:
        data = data.hold(place(network, world.size)[world.rank].tolist())
        _load.cache_clear()
    return Setting(
        data=data,
        test_data=given.test,
        test_counts=given.test_counts,
        network=network,
        loss=loss,
        wanted=experiment.metrics,
        classes=given.classes or 0,
        personalize=experiment.personalize,
        make_module=partial(initial_module, *module),
        on_meta=":" not in problem.model.name,
        augment=as_augment(problem.augment),
        terms=problem,
        mean=given.mean,
        std=given.std,
        seed=seed,
        device=device,
        dtype=getattr(torch, experiment.dtype),
        precision=experiment.precision,
        labels=labels,
        world=world,
    )


def named_data(
    choice: Choice, rule: Callable[[], Partitioner] | None, *, nodes: int, seed: int, data_dir: Path | None
) -> NodesData:
    """The named data of every node, divided by ``rule()`` unless they are already."""
    found = load_dataset(choice, nodes, seed, data_dir)
    return divide(choice.name, found, rule, nodes=nodes, seed=seed)


def partition_rule(choice: Choice) -> Callable[[], Partitioner] | None:
    """What makes the chosen rule; None for the default, which says nothing about data divided already."""
    if choice == ProblemConfig.model_fields["partition"].default:
        return None
    return partial(PARTITIONERS.build, choice.name, choice.parameters)


def load_dataset(choice: Choice, nodes: int, seed: int, data_dir: Path | None) -> Dataset | TrainTest:
    """The named data, not divided yet; the last few stay in memory, since many jobs read the same."""
    return _load(choice.name, json.dumps(choice.parameters, sort_keys=True), nodes, seed, data_dir)


def label_table(data: AnyData, classes: int | None) -> np.ndarray:
    """[n, classes]: samples of each class at each node; no column where they are not known to be labels."""
    labels = data.targets if isinstance(data, FederatedData) else None
    if labels is None or labels.dim() != 1 or not 0 < (classes or 0) <= MOST_CLASSES:
        return np.empty((data.nodes, 0), np.int64)
    assert isinstance(data, FederatedData)
    assert classes is not None
    return data.label_table(classes)


@lru_cache(maxsize=4)
def _load(name: str, parameters: str, nodes: int, seed: int, data_dir: Path | None) -> Dataset | TrainTest:
    return load_data(name, json.loads(parameters), nodes=nodes, seed=seed, data_dir=data_dir)


def facts(setting: Setting) -> dict[str, float]:
    """What is worth knowing about a setting before training."""
    network, data = setting.network, setting.data
    return {
        "dimension": setting.dim,
        "nodes": network.nodes,
        "directed_links": network.directed_links,
        "spectral_lambda": network.spectral_lambda,
        "mixing_parameter": network.mixing_parameter,
        "samples": int(np.sum(data.counts)),
        "unused_samples": data.unused,
        "min_samples_per_node": int(np.min(data.counts)),
        "max_samples_per_node": int(np.max(data.counts)),
        "test_samples": 0 if setting.test_data is None else len(next(leaves(setting.test_data))),
    }
