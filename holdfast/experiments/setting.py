"""From a checked experiment and a seed to what the assembly line needs: data, model, network, method."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from holdfast.algorithms import Method
from holdfast.algorithms.load import algorithm_class, build_algorithm, own_parts
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.tree import leaves
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
from holdfast.engines.cluster.placement import place
from holdfast.experiments.assembly import Setting
from holdfast.experiments.choices import as_augment, as_loss, initial_module, outputs_for
from holdfast.experiments.config import Choice, Experiment, ProblemConfig
from holdfast.experiments.networks import configured_network
from holdfast.problem.reference.curvature import estimate_curvature

MOST_CLASSES = 1000  # that a report shows


def build_method(experiment: Experiment, setting: Setting) -> Method:
    """The experiment's algorithm, its hyperparameters checked."""
    return setting.fitted(_given_method(experiment, setting), experiment.algorithm.local_epochs)


def _given_method(experiment: Experiment, setting: Setting) -> Method:
    name, parameters = experiment.algorithm.name, experiment.algorithm.parameters
    if experiment.algorithm.curvature == "given":
        return build_algorithm(name, parameters)
    maker: type[Method] = algorithm_class(name)
    if not maker.uses_curvature:
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
