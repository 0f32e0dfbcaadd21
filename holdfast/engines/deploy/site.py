"""A node's own site: its data, its objective, what it measures at home."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.arrays import labels_below
from holdfast.data.dataset import Dataset
from holdfast.data.federated import FederatedData
from holdfast.data.files import npz
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member import data_digest
from holdfast.experiments.setting import initial_module, torch_device
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import LOSSES
from holdfast.problem.model_problem import ModelObjective
from holdfast.problem.regulariser import Regulariser


def initial_model(federation: Federation, device: str = "cpu") -> FlatModel:
    """The model that everybody starts from; a server makes it without any data."""
    problem = federation.problem
    outputs = LOSSES.build(problem.loss.name, problem.loss.parameters).outputs(problem.classes)
    module = initial_module(federation.model, tuple(problem.input_shape), outputs, federation.seed)
    model = FlatModel(module, torch_device(device), federation.torch_dtype)
    for name, piece in model.parameters(model.x0).items():
        parameter = module.get_parameter(name)
        if (parameter.dtype, parameter.device) == (piece.dtype, piece.device):
            parameter.data = piece  # one copy is enough
    return model


@dataclass(frozen=True)
class Site:
    """What node number ``node`` has at home. None of it leaves."""

    node: int
    objective: ModelObjective
    test: tuple[Tensor, Tensor] | None
    digest: str  # of the data

    def measure(self, row: Tensor) -> dict[str, float]:
        """The objective on the node's own data, and its own test split, at the model ``row`` [1, d]."""
        # The objective knows of this node only, whose share in the common one is 1/n.
        metrics = {"local_loss": self.objective.nodes * float(self.objective.global_value(row[0]))}
        if self.test is not None:
            accuracy, loss = self.objective.test(row, *self.test)
            if self.objective.loss.has_accuracy:
                metrics["test_accuracy"] = float(accuracy[0])
            metrics["test_loss"] = float(loss[0])
        return metrics


def open_site(federation: Federation, name: str, dataset: Dataset, device: str = "cpu") -> Site:
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
    counts = np.array(federation.counts)
    if counts[node] not in (0, len(dataset.x_train)):
        raise HoldfastError(
            f"data: there are {len(dataset.x_train)} samples, the federation file says {counts[node]}"
        )
    counts[node] = len(dataset.x_train)
    objective = ModelObjective(
        initial_model(federation, device),
        LOSSES.build(problem.loss.name, problem.loss.parameters),
        FederatedData(dataset.x_train, dataset.y_train, counts, held=np.array([node])),
        batch_size=None if problem.batch_size == "full" else problem.batch_size,
        seed=federation.seed,
        regulariser=Regulariser(l2=problem.l2, l1=problem.l1, nonconvex=problem.nonconvex),
        weights=problem.weights,
        mean=problem.mean,
        std=problem.std,
    )
    test = objective.test_set(dataset.x_test, dataset.y_test) if len(dataset.x_test) else None
    objective.check_model(test)
    parts = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    return Site(node, objective, test, data_digest(parts))


def read_data(path: Path) -> Dataset:
    """A node's own npz file: x_train, y_train and, for its own test split, x_test and y_test."""
    return npz(str(path))
