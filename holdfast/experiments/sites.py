"""The site of a deployed node, opened as a federation file describes it: its data and its problem."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.data.arrays import labels_below
from holdfast.data.dataset import Dataset
from holdfast.data.federated import FederatedData
from holdfast.data.files import npz
from holdfast.data.samples import Pair
from holdfast.engines.deploy.site import Site
from holdfast.engines.deploy.storage.digests import data_digest
from holdfast.experiments.assembly import build_problem, convexity_warning, initial_module, torch_device
from holdfast.experiments.federation import FederationFile
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES, Loss


def initial_model(federation: FederationFile) -> FlatModel:
    """The model that everybody starts from; a server makes it without any data."""
    module = _initial_module(federation)
    model = FlatModel(module, torch_device("cpu"), federation.torch_dtype)
    _share_memory(module, model)
    return model


def open_site(federation: FederationFile, name: str, dataset: Dataset, device: str = "cpu") -> Site:
    """The site of the node called ``name`` with ``dataset``, checked against the federation file."""
    node = federation.names.index(name)
    problem = federation.problem
    if dataset.input_shape != tuple(problem.input_shape):
        raise HoldfastError(
            f"data: samples are {list(dataset.input_shape)}, the federation file says {problem.input_shape}"
        )
    if (problem.classes is None) != dataset.y_train.is_floating_point():
        kind = "real targets" if problem.classes is None else f"class labels 0..{problem.classes - 1}"
        raise HoldfastError(f"data: the federation file says {kind}, y_train is {dataset.y_train.dtype}")
    if problem.classes is not None:
        labels_below("y_train", dataset.y_train, problem.classes)
        labels_below("y_test", dataset.y_test, problem.classes)
    if problem.buffers != "local":
        raise HoldfastError(
            f'buffers = "{problem.buffers}": a deployed node knows the statistics of its own data only; '
            'use buffers = "local"'
        )
    counts = np.array(federation.counts)
    if counts[node] not in (0, len(dataset.x_train)):
        raise HoldfastError(
            f"data: there are {len(dataset.x_train)} samples, the federation file says {counts[node]}"
        )
    counts[node] = len(dataset.x_train)
    module = _initial_module(federation)
    objective = build_problem(
        module,
        FederatedData(dataset.x_train, dataset.y_train, counts, held=np.array([node])),
        loss=_loss(federation),
        **problem.options,
        seed=federation.seed,
        mean=problem.mean,
        std=problem.std,
        device=device,
        dtype=federation.torch_dtype,
        precision=None,
    )
    _share_memory(module, objective.model)
    test = objective.test_set(Pair(dataset.x_test, dataset.y_test)) if len(dataset.x_test) else None
    objective.check_model(test)
    parts = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    warning = convexity_warning(federation.algorithm.name, federation.method, objective)
    return Site(node, objective, test, data_digest(parts), warning)


def read_data(path: Path) -> Dataset:
    """A node's own npz file: x_train, y_train and, for its own test split, x_test and y_test."""
    return npz(str(path))


def _loss(federation: FederationFile) -> Loss:
    return LOSSES.build(federation.problem.loss.name, federation.problem.loss.parameters)


def _initial_module(federation: FederationFile) -> nn.Module:
    problem = federation.problem
    outputs = _loss(federation).outputs(problem.classes)
    return initial_module(federation.model, tuple(problem.input_shape), outputs, federation.seed)


def _share_memory(module: nn.Module, model: FlatModel) -> None:
    """Has ``module`` use the numbers of ``model``, which was made of it: one copy is enough."""
    for name, piece in model.parameters(model.x0).items():
        parameter = module.get_parameter(name)
        if (parameter.dtype, parameter.device) == (piece.dtype, piece.device):
            parameter.data = piece
