"""The site of a deployed node, opened as a federation file describes it: its data and its problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.data.arrays import labels_below
from holdfast.data.columns import Columns, has_columns, read_columns
from holdfast.data.dataset import Dataset
from holdfast.data.federated import FederatedData
from holdfast.data.files import npz
from holdfast.data.samples import Pair
from holdfast.engines.deploy.site import Site
from holdfast.engines.deploy.storage.store import data_digest
from holdfast.experiments.assembly import build_problem, convexity_warning, torch_device
from holdfast.experiments.choices import initial_module
from holdfast.experiments.federation import CommonProblem, FederationFile
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES, Loss


def initial_model(federation: FederationFile) -> FlatModel:
    """The model that everybody starts from; a server makes it without any data."""
    module = _initial_module(federation)
    model = FlatModel(module, torch_device("cpu"), federation.torch_dtype)
    _share_memory(module, model)
    return model


def open_site(federation: FederationFile, name: str, dataset: Dataset | Columns, device: str = "cpu") -> Site:
    """The site of the node called ``name`` with ``dataset``, checked against the federation file."""
    node = federation.names.index(name)
    train, test = _samples(federation.problem, dataset)
    counts, own = np.array(federation.counts), len(next(leaves(train)))
    if counts[node] not in (0, own):
        raise HoldfastError(f"data: there are {own} samples, the federation file says {counts[node]}")
    counts[node] = own
    if federation.problem.buffers != "local":
        raise HoldfastError(
            f'buffers = "{federation.problem.buffers}": a deployed node knows the statistics of its own data '
            'only; use buffers = "local"'
        )
    module = _initial_module(federation)
    x, y = train if isinstance(train, Pair) else (train, None)
    problem = build_problem(
        module,
        FederatedData(x, y, counts, held=np.array([node])),
        loss=_loss(federation),
        **federation.problem.options,
        seed=federation.seed,
        mean=federation.problem.mean,
        std=federation.problem.std,
        device=device,
        dtype=federation.torch_dtype,
        precision=None,
    )
    _share_memory(module, problem.model)
    placed = None if test is None else problem.test_set(test)
    problem.check_model(placed)
    digest = data_digest([*leaves(train), *leaves(() if test is None else test)])
    warning = convexity_warning(federation.algorithm.name, federation.method, problem)
    return Site(node, problem, placed, digest, warning)


def _samples(described: CommonProblem, dataset: Dataset | Columns) -> tuple[Any, Any]:
    """Samples to train and, if there are any, to test on, checked against the federation file."""
    if isinstance(dataset, Columns):
        if dataset.shapes != described.columns:
            told = f"columns = {described.columns}, input_shape = {described.input_shape}"
            raise HoldfastError(f"data: columns are {dataset.shapes}, the federation file says {told}")
        return dataset.train, dataset.test
    if list(dataset.input_shape) != described.input_shape:
        raise HoldfastError(
            f"data: samples are {list(dataset.input_shape)}, the federation file says "
            f"{described.input_shape or f'columns = {described.columns}'}"
        )
    if (described.classes is None) != dataset.y_train.is_floating_point():
        kind = "real targets" if described.classes is None else f"class labels 0..{described.classes - 1}"
        raise HoldfastError(f"data: the federation file says {kind}, y_train is {dataset.y_train.dtype}")
    if described.classes is not None:
        labels_below("y_train", dataset.y_train, described.classes)
        labels_below("y_test", dataset.y_test, described.classes)
    test = Pair(dataset.x_test, dataset.y_test) if len(dataset.x_test) else None
    return Pair(dataset.x_train, dataset.y_train), test


def read_data(path: Path) -> Dataset | Columns:
    """A node's own npz file: x_train, y_train and, to test on, x_test, y_test; or columns train/NAME."""
    return read_columns(path) if has_columns(path) else npz(str(path))


def _loss(federation: FederationFile) -> Loss:
    return LOSSES.build(federation.problem.loss.name, federation.problem.loss.parameters)


def _initial_module(federation: FederationFile) -> nn.Module:
    described = federation.problem
    outputs = _loss(federation).outputs(described.classes)
    shape = tuple(described.input_shape or ())
    return initial_module(federation.model, shape, outputs, federation.seed)


def _share_memory(module: nn.Module, model: FlatModel) -> None:
    """Has ``module`` use the numbers of ``model``, which was made of it: one copy is enough."""
    for name, piece in model.parameters(model.x0).items():
        parameter = module.get_parameter(name)
        if (parameter.dtype, parameter.device) == (piece.dtype, piece.device):
            parameter.data = piece
