"""The site of a node: its data and its problem, opened as the federation file describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.fingerprint import fingerprint
from holdfast.core.tree import leaves
from holdfast.data.dataset import Dataset, TrainTest
from holdfast.data.federated import FederatedData
from holdfast.data.files import npz
from holdfast.data.lazy import AnyData, shape_of_inputs
from holdfast.data.load import call_own
from holdfast.data.per_node import from_datasets, read_tests
from holdfast.data.samples import Pair, labels_below
from holdfast.data.tables import Columns, has_columns, read_columns
from holdfast.experiments.setting import build_problem, convexity_warning, torch_device
from holdfast.problem.flat import FlatModel
from holdfast.problem.lazy_source import SOME
from holdfast.problem.model_problem import ModelProblem
from holdfast_deploy.federation_file import CommonProblem, FederationFile
from holdfast_deploy.reading import Reading
from holdfast_deploy.storage.store import data_digest


@dataclass(frozen=True)
class Site:
    """What node number ``node`` has locally. None of it leaves."""

    node: int
    problem: ModelProblem
    test: Any  # a tree of samples; None: no test split
    digest: str  # of the data
    warning: str | None = None  # what the user should know, though it is no mistake
    counted_noise: bool = False  # for tests: private noise from the seed, as in a simulation
    reading: Reading = field(default_factory=Reading)  # what its columns are, as far as that is known

    def measure(self, row: Tensor) -> dict[str, float]:
        """The objective on the node's own data, and its own test split, at the model ``row`` [1, d].

        If BatchNorm's statistics are not behind it, [1, d + 2 s], they are those of the node's own data.
        """
        # The objective knows of this node only, whose share in the common one is 1/n.
        metrics = {}
        if self.problem.source.finite:
            metrics["local_loss"] = self.problem.nodes * float(self.problem.global_value(row[0]))
        if self.test is not None:
            accuracy, loss = self.problem.tester.test(row, self.test)
            if self.problem.loss.has_accuracy:
                metrics["test_accuracy"] = float(accuracy[0])
            metrics["test_loss"] = float(loss[0])
        return metrics


def initial_model(federation: FederationFile) -> FlatModel:
    """The model that all members start from; a server makes it without any data."""
    module = federation.module()
    model = FlatModel(module, torch_device("cpu"), federation.torch_dtype)
    _share_memory(module, model)
    return model


def open_site(
    federation: FederationFile, name: str, own: Any, device: str = "cpu", *, counted_noise: bool = False
) -> Site:
    """The site of the node called ``name`` with its ``own`` data, checked against the federation file.

    They are what ``own_data`` gives: a ``Dataset`` or ``Columns``; or samples of one node as ``hf.train``
    takes them, a ``Stream``, or either in a ``TrainTest``. ``counted_noise``: for tests of private
    federations, which then compute what a simulation with the same seed does. It protects nobody, and no
    command sets it.
    """
    node, described = federation.names.index(name), federation.problem
    data, test = _of_one_node(own)
    _check_form(described, data, test)
    counts = np.array(federation.counts)
    if data.finite and counts[node] not in (0, len(data)):
        raise HoldfastError(f"data: there are {len(data)} samples, the federation file says {counts[node]}")
    module = federation.module()
    options = described.options
    if options["backend"] == "auto" and all(p.requires_grad for p in module.parameters()):
        options["backend"] = "loop"  # a single row has none to be stacked with, and a trial of two is large
    problem = build_problem(
        module,
        data.at_site(node, counts),
        loss=federation.loss,
        **options,
        seed=federation.seed,
        mean=described.mean,
        std=described.std,
        device=device,
        dtype=federation.torch_dtype,
        precision=None,
    )
    _share_memory(module, problem.model)
    placed = None if test is None else problem.test_set(test)
    problem.check_model(placed)
    warning = convexity_warning(federation.algorithm.name, federation.method, problem)
    return Site(node, problem, placed, _digest(data, test), warning, counted_noise, _reading(own))


def _of_one_node(own: Any) -> tuple[AnyData, Any]:
    """A node's data, and the samples to test on, if there are any."""
    if isinstance(own, Dataset):
        test = Pair(own.x_test, own.y_test) if len(own.x_test) else None
        return FederatedData.of_nodes([(own.x_train, own.y_train)]), test
    if isinstance(own, Columns):
        return FederatedData.of_nodes([own.train]), own.test
    train, test = own if isinstance(own, TrainTest) else (own, None)
    data = train if isinstance(train, AnyData) else from_datasets([train])
    if data.finite and data.nodes != 1:
        raise HoldfastError(f"data: a site has the data of one node, these are of {data.nodes}")
    return data, read_tests(test, data)[0]


def _check_form(described: CommonProblem, data: AnyData, test: Any) -> None:
    """Refuses samples that are not what the federation file says; of those read when drawn, the first."""
    samples = data.samples if isinstance(data, FederatedData) else data.first(SOME)
    if not isinstance(samples, Pair):
        shapes = {name: list(column.shape[1:]) for name, column in samples.items()}
        if shapes != described.columns:
            expected = f"columns = {described.columns}, input_shape = {described.input_shape}"
            raise HoldfastError(f"data: columns are {shapes}, the federation file says {expected}")
        return
    shape = list(shape_of_inputs(samples))
    if shape != described.input_shape:
        raise HoldfastError(
            f"data: samples are {shape}, the federation file says "
            f"{described.input_shape or f'columns = {described.columns}'}"
        )
    if (described.classes is None) != samples.y.is_floating_point():
        kind = "real targets" if described.classes is None else f"class labels 0..{described.classes - 1}"
        raise HoldfastError(f"data: the federation file says {kind}, y_train is {samples.y.dtype}")
    if described.classes is not None:
        labels_below("y_train", samples.y, described.classes)
        if test is not None:
            labels_below("y_test", test.y, described.classes)


def _reading(own: Any) -> Reading:
    """What is known of the columns and classes of a node's ``own`` data."""
    train = own.train if isinstance(own, TrainTest) else own
    return Reading.of(getattr(train, "table", None), getattr(train, "class_names", None))


def _digest(data: AnyData, test: Any) -> str:
    """Tells the site's data from others: by all samples, or, where they are read when drawn, by the first."""
    tests = list(leaves(() if test is None else test))
    if isinstance(data, FederatedData):
        return data_digest([*leaves(data.samples), *tests])
    return fingerprint([data, tests])[:16]


def read_data(path: Path) -> Dataset | Columns:
    """A node's own npz file: x_train, y_train and, to test on, x_test, y_test; or columns train/NAME."""
    return read_columns(path) if has_columns(path) else npz(str(path))


def names_code(given: str | Path) -> bool:
    """Whether ``--data`` is the site's own ``module:function``, and not a file."""
    return ":" in str(given) and not Path(given).exists()


def own_data(given: str | Path, node: str) -> Any:
    """What ``--data`` names, as ``open_site`` takes it: an npz file, or what the site's function returns.

    A function gets the name of the ``node`` if it has that parameter.
    """
    if names_code(given):
        return call_own("--data", str(given), {}, {"node": node})
    return read_data(Path(given))


def _share_memory(module: nn.Module, model: FlatModel) -> None:
    """Has ``module`` use the numbers of ``model``, which was made of it: one copy is enough."""
    for name, piece in model.parameters(model.x0).items():
        parameter = module.get_parameter(name)
        if (parameter.dtype, parameter.device) == (piece.dtype, piece.device):
            parameter.data = piece
