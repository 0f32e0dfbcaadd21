"""From a checked experiment and a seed to the things that run: data, model, objective, network, method."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.algorithms import ALGORITHMS, Method
from holdfast.data import DATASETS, PARTITIONS, Dataset, FederatedData, partition
from holdfast.errors import HoldfastError
from holdfast.metrics.measured import choose_metrics
from holdfast.models import MODELS, import_model
from holdfast.objective.flat import FlatModel
from holdfast.objective.losses import LOSSES
from holdfast.objective.model_objective import ModelObjective, Regulariser
from holdfast.runs.config import Choice, Experiment
from holdfast.topology import Network, build_network


@dataclass(frozen=True)
class Setting:
    """Everything that the algorithms of an experiment share for one seed."""

    dataset: Dataset
    data: FederatedData
    network: Network
    objective: ModelObjective
    test: tuple[Tensor, Tensor] | None
    metrics: list[str]


def build_method(experiment: Experiment) -> Method:
    """The experiment's algorithm, its hyperparameters checked."""
    return ALGORITHMS.build(experiment.algorithm.name, experiment.algorithm.parameters)


def build_setting(experiment: Experiment, seed: int, data_dir: Path | None, device: str) -> Setting:
    """Loads, splits and checks everything; the same for every algorithm."""
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
    mixing = experiment.network.mixing
    network = build_network(
        experiment.network.topology.name,
        experiment.network.topology.parameters,
        mixing.name if mixing else None,
        mixing.parameters if mixing else {},
        nodes=problem.nodes,
        seed=seed,
    )
    loss = LOSSES.build(problem.loss.name, problem.loss.parameters)
    module = build_model(problem.model, dataset.input_shape, loss.outputs(dataset.classes), seed)
    objective = ModelObjective(
        FlatModel(module, torch_device(device), getattr(torch, experiment.dtype)),
        loss,
        data,
        batch_size=None if problem.batch_size == "full" else problem.batch_size,
        seed=seed,
        regulariser=Regulariser(problem.l2, problem.nonconvex),
        weights=problem.weights,
        mean=dataset.mean,
        std=dataset.std,
    )
    test = objective.test_set(dataset.x_test, dataset.y_test) if len(dataset.x_test) else None
    objective.check_model(test)
    wanted = None if experiment.evaluation.metrics == "default" else experiment.evaluation.metrics
    metrics = choose_metrics(wanted, has_test=test is not None, has_accuracy=loss.has_accuracy)
    return Setting(dataset, data, network, objective, test, metrics)


def load_dataset(choice: Choice, nodes: int, seed: int, data_dir: Path | None) -> Dataset:
    """The named data set; the last few stay in memory, since many jobs read the same one."""
    return _load_dataset(choice.name, tuple(sorted(choice.parameters.items())), nodes, seed, data_dir)


@lru_cache(maxsize=4)
def _load_dataset(
    name: str, parameters: tuple[tuple[str, Any], ...], nodes: int, seed: int, data_dir: Path | None
) -> Dataset:
    return DATASETS.build(name, dict(parameters), nodes=nodes, seed=seed, data_dir=data_dir)


def build_model(choice: Choice, input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """A registered model, or the user's own ``module:Class``, initialised from ``seed``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if ":" not in choice.name:
            return MODELS.build(choice.name, choice.parameters, input_shape=input_shape, outputs=outputs)
        maker = import_model(choice.name)
        try:
            return maker(**choice.parameters)
        except TypeError as error:
            raise HoldfastError(f"problem.model: {choice.name} cannot be built: {error}") from None


def torch_device(name: str) -> torch.device:
    """The device called ``name``, if this machine has it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HoldfastError(f"device: expected 'cpu', 'cuda' or 'cuda:0', got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HoldfastError("device: 'cuda' was asked for, but torch sees no GPU here; use --device cpu")
    return device


def facts(setting: Setting) -> dict[str, float]:
    """What is worth knowing about a setting before training."""
    network, data = setting.network, setting.data
    return {
        "dimension": setting.objective.dim,
        "nodes": network.nodes,
        "directed_links": network.directed_links,
        "spectral_lambda": network.spectral_lambda,
        "mixing_parameter": network.mixing_parameter,
        "samples": len(data.x),
        "unused_samples": data.unused,
        "min_samples_per_node": int(np.min(data.counts)),
        "max_samples_per_node": int(np.max(data.counts)),
        "test_samples": len(setting.dataset.x_test),
    }
