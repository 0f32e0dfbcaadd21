"""From a checked experiment and a seed to the things that run: data, model, objective, network, method."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.algorithms import Method
from holdfast.algorithms.load import algorithm_class, build_algorithm
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.precision import compute_in
from holdfast.core.validation import parameters as accepted_parameters
from holdfast.core.world import ALONE, World
from holdfast.data import DATASETS, PARTITIONS, Dataset, FederatedData, partition
from holdfast.engines.cluster.placement import place
from holdfast.experiments.config import Choice, Experiment, NetworkConfig
from holdfast.experiments.metrics import choose_metrics
from holdfast.models import load_model
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES, Loss
from holdfast.problem.model_problem import ModelObjective
from holdfast.problem.reference.curvature import estimate_curvature
from holdfast.problem.regulariser import Regulariser
from holdfast.topology import Network, build_network, read_chance


@dataclass(frozen=True)
class Setting:
    """Everything that the algorithms of an experiment share for one seed; the model is made when needed."""

    experiment: Experiment
    seed: int
    device: str
    dataset: Dataset
    data: FederatedData
    labels: np.ndarray  # [n, classes] int64: how many samples of each class each node has; no column if none
    network: Network
    loss: Loss
    metrics: list[str]
    world: World

    @cached_property
    def dim(self) -> int:
        """Number of trainable parameters; a model of ours is counted without taking up memory."""
        if ":" in self.experiment.problem.model.name:
            return self.objective.dim
        with torch.device("meta"):
            module = self._module()
        return sum(p.numel() for p in module.parameters() if p.requires_grad)

    @cached_property
    def objective(self) -> ModelObjective:
        """The nodes' local objectives, all from the same initial model."""
        problem = self.experiment.problem
        return ModelObjective(
            FlatModel(
                self._module(),
                torch_device(self.device),
                getattr(torch, self.experiment.dtype),
                compute_in(self.experiment.precision),
            ),
            self.loss,
            self.data,
            batch_size=None if problem.batch_size == "full" else problem.batch_size,
            seed=self.seed,
            regulariser=Regulariser(l2=problem.l2, l1=problem.l1, nonconvex=problem.nonconvex),
            weights=problem.weights,
            backend=problem.backend,
            mean=self.dataset.mean,
            std=self.dataset.std,
        )

    @cached_property
    def test(self) -> tuple[Tensor, Tensor] | None:
        """The test set, if there is one, where the objective computes."""
        dataset = self.dataset
        return self.objective.test_set(dataset.x_test, dataset.y_test) if len(dataset.x_test) else None

    def _module(self) -> nn.Module:
        outputs = self.loss.outputs(self.dataset.classes)
        return initial_module(self.experiment.problem.model, self.dataset.input_shape, outputs, self.seed)


def initial_module(choice: Choice, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The chosen model as everybody starts from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(choice.name, choice.parameters, input_shape, outputs)


def build_method(experiment: Experiment, setting: Setting) -> Method:
    """The experiment's algorithm, its hyperparameters checked."""
    name, parameters = experiment.algorithm.name, experiment.algorithm.parameters
    if experiment.algorithm.curvature == "given":
        return build_algorithm(name, parameters)
    maker: Any = algorithm_class(name)
    if not hasattr(maker, "for_problem"):
        raise HoldfastError(f"algorithm.curvature: {name!r} does not use the curvature; leave it out")
    for key in parameters:
        if key not in accepted_parameters(maker):
            raise unknown(f"key in algorithm {name!r}", key, accepted_parameters(maker))
    curvature = estimate_curvature(setting.objective, setting.world)
    method: Method = maker.for_problem(curvature.mu, curvature.L, **parameters)
    return method


def build_setting(
    experiment: Experiment, seed: int, data_dir: Path | None, device: str, world: World = ALONE
) -> Setting:
    """Loads, splits and checks everything but the model; the same for every algorithm.

    A process of several keeps the samples of its own nodes only.
    """
    problem = experiment.problem
    dataset = load_dataset(problem.dataset, problem.nodes, seed, data_dir)
    data = partition(
        dataset.x_train,
        dataset.y_train,
        PARTITIONS.build(problem.partition.name, problem.partition.parameters),
        nodes=problem.nodes,
        seed=seed,
        groups=dataset.groups,
    )
    network = configured_network(experiment.network, problem.nodes, seed)
    loss = LOSSES.build(problem.loss.name, problem.loss.parameters)
    wanted = None if experiment.evaluation.metrics == "default" else experiment.evaluation.metrics
    metrics = choose_metrics(wanted, has_test=len(dataset.x_test) > 0, has_accuracy=loss.has_accuracy)
    classes = dataset.classes
    labels = data.label_table(classes) if classes else np.empty((data.nodes, 0), dtype=np.int64)
    if world.size > 1:
        data = data.hold(place(network, world.size)[world.rank].tolist())
        one = slice(1)  # for its shape
        dataset = replace(
            dataset, x_train=dataset.x_train[one].clone(), y_train=dataset.y_train[one].clone(), groups=None
        )
        _load_dataset.cache_clear()
    return Setting(experiment, seed, device, dataset, data, labels, network, loss, metrics, world)


def configured_network(config: NetworkConfig, nodes: int, seed: int) -> Network:
    """The network that an experiment or a federation describes, sporadic if it says so."""
    network = build_network(
        config.topology.name,
        config.topology.parameters,
        config.mixing.name if config.mixing else None,
        config.mixing.parameters if config.mixing else {},
        nodes=nodes,
        seed=seed,
        graph_every=config.graph_every,
    )
    if (config.compute, config.links, config.redraw_every, config.latched_links) == (None, None, None, False):
        return network
    return network.sporadic(
        1.0 if config.compute is None else read_chance("compute", config.compute),
        1.0 if config.links is None else read_chance("links", config.links),
        seed=seed,
        redraw_every=config.redraw_every,
        latched_links=config.latched_links,
    )


def load_dataset(choice: Choice, nodes: int, seed: int, data_dir: Path | None) -> Dataset:
    """The named data set; the last few stay in memory, since many jobs read the same one."""
    return _load_dataset(choice.name, json.dumps(choice.parameters, sort_keys=True), nodes, seed, data_dir)


@lru_cache(maxsize=4)
def _load_dataset(name: str, parameters: str, nodes: int, seed: int, data_dir: Path | None) -> Dataset:
    return DATASETS.build(name, json.loads(parameters), nodes=nodes, seed=seed, data_dir=data_dir)


def torch_device(name: str) -> torch.device:
    """The device called ``name``, if this machine has it."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise HoldfastError(f"device: should be 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise HoldfastError(f"device: {name!r} was asked for, but torch sees {count} GPUs here; use 'cpu'")
    return device


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
        "test_samples": len(setting.dataset.x_test),
    }
