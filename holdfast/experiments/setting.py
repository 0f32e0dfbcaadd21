"""From a checked experiment and a seed to what the assembly line needs: data, model, network, method."""

from __future__ import annotations

import json
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
from holdfast.data import PARTITIONERS, Dataset, FederatedData, load_data, partition
from holdfast.data.samples import Pair
from holdfast.engines.cluster.placement import place
from holdfast.experiments.assembly import Setting, configured_network
from holdfast.experiments.choices import as_loss, initial_module
from holdfast.experiments.config import Choice, Experiment, ProblemConfig
from holdfast.problem.reference.curvature import estimate_curvature


def build_method(experiment: Experiment, setting: Setting) -> Method:
    """The experiment's algorithm, its hyperparameters checked."""
    name, parameters = experiment.algorithm.name, experiment.algorithm.parameters
    if experiment.algorithm.curvature == "given":
        return build_algorithm(name, parameters)
    maker: type[Method] = algorithm_class(name)
    if not maker.uses_curvature:
        raise HoldfastError(f"algorithm.curvature: {name!r} does not use the curvature; leave it out")
    for key in parameters:
        if key not in accepted_parameters(maker):
            raise unknown(f"key in algorithm {name!r}", key, accepted_parameters(maker))
    curvature = estimate_curvature(setting.problem, setting.world)
    return maker.for_problem(curvature.mu, curvature.L, **own_parts(parameters))


def build_setting(
    experiment: Experiment, seed: int, data_dir: Path | None, device: str, world: World = ALONE
) -> Setting:
    """Loads, splits and checks everything but the model; the same for every algorithm.

    A process of several keeps the samples of its own nodes only.
    """
    problem = experiment.problem
    dataset = load_dataset(problem.dataset, problem.nodes, seed, data_dir)
    data = split(dataset, problem, seed)
    network = configured_network(experiment.network, problem.nodes, seed)
    loss = as_loss(problem.loss)
    test = None
    mean, std, classes = 0.0, 1.0, data.classes
    if isinstance(dataset, Dataset):
        mean, std, classes = dataset.mean, dataset.std, dataset.classes
        test = Pair(dataset.x_test, dataset.y_test) if len(dataset.x_test) else None
    labels = data.label_table(classes) if classes else np.empty((data.nodes, 0), np.int64)
    module = (problem.model, data.input_shape, loss.outputs(classes), seed)
    if world.size > 1:
        data = data.hold(place(network, world.size)[world.rank].tolist())
        _load_dataset.cache_clear()
    return Setting(
        data=data,
        test_data=test,
        network=network,
        loss=loss,
        wanted=experiment.metrics,
        classes=labels.shape[1],
        personalize=experiment.personalize,
        make_module=partial(initial_module, *module),
        on_meta=":" not in problem.model.name,
        terms=problem,
        mean=mean,
        std=std,
        seed=seed,
        device=device,
        dtype=getattr(torch, experiment.dtype),
        precision=experiment.precision,
        labels=labels,
        world=world,
    )


def split(dataset: Dataset | FederatedData, problem: ProblemConfig, seed: int) -> FederatedData:
    """The samples of every node, divided as the experiment says unless the user's own function did it."""
    if isinstance(dataset, Dataset):
        rule = PARTITIONERS.build(problem.partition.name, problem.partition.parameters)
        samples = (dataset.x_train, dataset.y_train)
        return partition(*samples, rule, nodes=problem.nodes, seed=seed, groups=dataset.groups)
    if problem.partition != ProblemConfig.model_fields["partition"].default:
        raise HoldfastError(
            f"problem.partition: {problem.dataset.name} has divided the data already; leave partition out"
        )
    return dataset


def load_dataset(choice: Choice, nodes: int, seed: int, data_dir: Path | None) -> Dataset | FederatedData:
    """The named data set; the last few stay in memory, since many jobs read the same one."""
    return _load_dataset(choice.name, json.dumps(choice.parameters, sort_keys=True), nodes, seed, data_dir)


@lru_cache(maxsize=4)
def _load_dataset(
    name: str, parameters: str, nodes: int, seed: int, data_dir: Path | None
) -> Dataset | FederatedData:
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
