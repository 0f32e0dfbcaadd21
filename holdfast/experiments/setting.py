"""From the description of a run and a seed to what is run: data, model, network, problem, simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from holdfast.algorithms.load import algorithm_class, build_algorithm, own_parts
from holdfast.contract import IDENTITY, Channel, Method
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.memory import require_memory
from holdfast.core.precision import Precision, compute_in
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Cohort
from holdfast.core.validation import parameters as accepted_parameters
from holdfast.core.world import ALONE, World
from holdfast.data import (
    Dataset,
    FederatedData,
    NodesData,
    Partitioner,
    TrainTest,
    divide,
    load_data,
)
from holdfast.data.lazy import AnyData
from holdfast.data.per_node import as_data, read_tests
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
    as_function,
    as_loss,
    as_module,
    as_partition,
    network_of,
    poisoned,
)
from holdfast.experiments.methods import LabelledMethod, LocalEpochs
from holdfast.experiments.metrics import Evaluation, Metric, choose_metrics
from holdfast.experiments.model_figures import HeldOut
from holdfast.experiments.option_forms import Choice, GivenLoss, GivenPartition, as_choice, of_seed
from holdfast.experiments.private_runs import check_private, planned_ledger, protected
from holdfast.experiments.spec import (
    AlgorithmConfig,
    Objective,
    ObjectiveOptions,
    ProblemSpec,
    TrainSpec,
    check_names,
    takes_options,
)
from holdfast.privacy import Ledger
from holdfast.problem.checks import Augment
from holdfast.problem.curvature import estimate_curvature, why_not_convex
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import Loss, OwnStep, Step
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.problem import Problem
from holdfast.problem.source import MOST_READY
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


@takes_options(Objective)
def build_problem(
    model: nn.Module,
    data: AnyData,
    *,
    loss: GivenLoss = "cross-entropy",
    step: Step | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    precision: Precision | None = "tf32",
    **options: Unpack[ObjectiveOptions],
) -> ModelProblem:
    """The nodes' local objectives: ``model`` with ``loss`` on the samples of each, and a regulariser.

    Arguments are those of ``hf.train``; samples enter the model as (x - mean)/std. ``precision``: see
    ``compute_in``, which sets switches of torch; None leaves them as they are.
    """
    check_names("hf.build_problem", Objective, options, set())
    terms = Objective.of(options)
    if terms.private is not None:
        raise HoldfastError("private: a problem alone counts no releases of data; give it to hf.train")
    compute_dtype = None if precision is None else compute_in(precision)
    return ModelProblem(
        FlatModel(model, torch_device(device), dtype, compute_dtype),
        as_loss(loss) if step is None else OwnStep(step),
        data,
        batch_size=None if terms.batch_size == "full" else terms.batch_size,
        sampling=terms.sampling,
        augment=augment,
        seed=seed,
        regulariser=Regulariser(**terms.model_dump(include=Regulariser.names())),
        weights=terms.weights,
        backend=terms.backend,
        buffers=terms.buffers,
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

    spec: TrainSpec
    data: AnyData
    test_data: Any  # a tree of samples, such as a pair (x, y); None: no test set
    network: Network
    loss: Loss
    make_module: Callable[[], nn.Module]
    seed: int
    device: str
    mean: float = 0.0  # samples enter the model as (x - mean)/std
    std: float = 1.0
    on_meta: bool = False  # whether ``make_module`` works on torch's device "meta", without any memory
    # [n, classes] int64: samples of each class at each node; no column if there are no classes
    labels: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    world: World = ALONE
    classes: int = 0  # in class labels; 0 if that is not known
    test_counts: list[int] | None = None  # test samples of each node, if they have their own
    # Of methods that were checked, by their ``id``; each profile holds its method, so these stay theirs.
    profiles: dict[int, Profile] = field(default_factory=dict, repr=False, compare=False)

    @property
    def objective(self) -> ProblemSpec:
        """What is minimised."""
        return self.spec.problem

    @cached_property
    def augment(self) -> Augment | None:
        """What is done to minibatches on the device."""
        found: Augment | None = as_function("augment", self.objective.augment, "my_module:flip")
        return found

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
            **self.objective.options,
            augment=self.augment,
            seed=self.seed,
            mean=self.mean,
            std=self.std,
            device=self.device,
            dtype=self.spec.numbers,
            precision=self.spec.precision,
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
            self.spec.metrics,
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
        return Evaluation(self.metrics, self.test, self.spec.personalize)

    def local_epochs(self, labelled: LabelledMethod) -> LocalEpochs | None:
        """The passes over the nodes' data that a method takes in a round; None: it counts its own steps."""
        epochs = labelled.local_epochs or self.spec.local_epochs
        return LocalEpochs(epochs, self.data.counts, self.objective.batch_size) if epochs else None

    def method(self, labelled: LabelledMethod) -> Method:
        """The method with what depends on data and model: curvature, steps of epochs, parts of the model."""
        given = labelled.method
        method = given if isinstance(given, Method) else self._described(given)
        if (epochs := self.local_epochs(labelled)) is not None:
            method = epochs.of(method)
        model = self.problem.model if method.names_parts else None
        return method if model is None else method.for_model(model.numbers)

    def _described(self, config: AlgorithmConfig) -> Method:
        """The method that an experiment file describes, its hyperparameters checked."""
        name, parameters = config.name, config.parameters
        if config.curvature == "given":
            return build_algorithm(name, parameters)
        maker: type[Method] = algorithm_class(name)
        if not maker.declared.uses_curvature:
            raise HoldfastError(f"algorithm.curvature: {name!r} does not use the curvature; leave it out")
        for key in parameters:
            if key not in accepted_parameters(maker):
                raise unknown(f"key in algorithm {name!r}", key, accepted_parameters(maker))
        if self.objective.private is not None:
            raise HoldfastError(
                "algorithm.curvature: it would be measured on private data; give the parameters themselves"
            )
        curvature = estimate_curvature(self.problem, self.world)
        return maker.for_problem(curvature.mu, curvature.L, **own_parts(parameters))

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
        compute_in(self.spec.precision)  # jobs before may have been computed in another
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
        prepared = self.data.numbers_everywhere * self.spec.numbers.itemsize
        full_batch = self.objective.batch_size == "full" and self.device == "cpu" and prepared <= MOST_READY
        rows = footprint.memory(self.data.nodes, self.dim, self.spec.numbers.itemsize)
        return int(rows + self.data.bytes_everywhere + (prepared if full_batch else 0))


# --- from the description of a run and a seed to its setting ------------------------------------------------


MOST_CLASSES = 1000  # that a report shows


def build_setting(
    spec: TrainSpec, seed: int, data_dir: Path | None, device: str, world: World = ALONE
) -> Setting:
    """Loads, splits and checks everything but the model; the same for every algorithm.

    A process of several keeps the samples of its own nodes only.
    """
    problem = spec.problem
    step = as_function("step", problem.step, "my_module:step")
    if step is not None and "loss" in problem.model_fields_set and problem.loss != Objective().loss:
        raise HoldfastError("step: it computes the loss itself; leave loss= out, or step=")
    loss = as_loss(problem.loss) if step is None else OwnStep(step)
    given = nodes_data(problem, seed, data_dir).that_count(loss.counted)
    data = given.train
    network = network_of(spec.network, data.nodes, seed)
    labels = label_table(data, given.classes)
    make_module, on_meta = as_module(of_seed(problem.model, seed), data, given.classes, loss, seed)
    if world.size > 1:
        data = data.hold(place(network, world.size)[world.rank].tolist())
        _load.cache_clear()
    return Setting(
        spec=spec,
        data=data,
        test_data=given.test,
        test_counts=given.test_counts,
        network=network,
        loss=loss,
        classes=given.classes or 0,
        make_module=make_module,
        on_meta=on_meta,
        mean=given.mean,
        std=given.std,
        seed=seed,
        device=device,
        labels=labels,
        world=world,
    )


def nodes_data(problem: ProblemSpec, seed: int, data_dir: Path | None) -> NodesData:
    """The data of every node and the test set: named and divided, or those of nodes already."""
    data = of_seed(problem.dataset, seed)
    if isinstance(data, str | Mapping | Choice):
        choice, rule = as_choice("data", data), partition_rule(problem.partition)
        found = load_dataset(choice, problem.nodes, seed, data_dir)
        given = divide(choice.name, found, rule, nodes=problem.nodes, seed=seed)
        if problem.test is None:
            return given
        samples, counts = read_tests(problem.test, given.train)
        return replace(given, test=samples, test_counts=counts)
    chosen = {**{name: name in problem.model_fields_set for name in ("nodes", "partition")}}
    for name, there in {**chosen, "data_dir": data_dir is not None}.items():
        if there:
            raise HoldfastError(
                f"{name}: only for data by name, such as data='digits'; these are given for each node. "
                "To divide samples: hf.partition"
            )
    train, own_test = data if isinstance(data, TrainTest) else (data, None)
    return NodesData.of(as_data(train), own_test if problem.test is None else problem.test)


def partition_rule(partition: GivenPartition) -> Callable[[], Partitioner] | None:
    """What makes the chosen rule; None for the default, which says nothing about data divided already."""
    if partition is None or partition == ProblemSpec.model_fields["partition"].default:
        return None
    return partial(as_partition, partition)


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
