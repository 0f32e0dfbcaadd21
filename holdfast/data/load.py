"""Data by name: registered ones, or what a ``module:function`` of the user's own returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import import_named
from holdfast.core.tree import leaves
from holdfast.core.validation import quoted
from holdfast.data.dataset import DATASETS, Dataset, TrainTest
from holdfast.data.federated import Counted, FederatedData
from holdfast.data.lazy import AnyData
from holdfast.data.partition import IID, Partitioner, partition, partition_dataset
from holdfast.data.per_node import as_data, from_datasets, read_tests, with_class_names
from holdfast.data.samples import Pair, is_dataset


@dataclass(frozen=True)
class NodesData:
    """The training data of all nodes, and the samples on which their models are tested."""

    train: AnyData
    test: Any = None  # a tree of samples; None: no test set
    test_counts: list[int] | None = None  # test samples of each node, if they have their own
    classes: int | None = None
    mean: float = 0.0  # samples enter the model as (x - mean)/std
    std: float = 1.0

    @classmethod
    def of(cls, train: AnyData, test: Any) -> NodesData:
        """Data that are divided already, with ``test`` as ``hf.train`` takes it."""
        return cls(train, *read_tests(test, train), train.classes)

    def that_count(self, counted: Counted) -> NodesData:
        """Without the samples in memory whose targets do not count for a loss; a warning tells how many."""
        train = (
            self.train.that_count("data", counted) if isinstance(self.train, FederatedData) else self.train
        )
        if self.test is None:
            return replace(self, train=train)
        x, y = self.test if isinstance(self.test, Pair) else (self.test, None)
        one = self.test_counts is None
        tests = FederatedData(x, y, np.array([len(next(leaves(x)))] if one else self.test_counts))
        kept = tests.that_count("test", counted)
        return replace(
            self, train=train, test=kept.samples, test_counts=None if one else kept.counts.tolist()
        )


def load_data(
    name: str, given: Mapping[str, Any], *, nodes: int, seed: int, data_dir: Path | None
) -> Dataset | TrainTest:
    """The registered data called ``name``, or what the user's ``module:function`` returns, given ``given``.

    A user's function also gets ``nodes``, ``seed`` and ``data_dir`` if it has parameters of these names. For
    the user's own experiment files and calls only: a name with a colon imports a module.
    """
    context = {"nodes": nodes, "seed": seed, "data_dir": data_dir}
    if ":" in name:
        found = call_own("dataset", name, given, context)
    else:
        found = DATASETS.build(name, given, **context)
    return found if isinstance(found, Dataset | TrainTest) else TrainTest(found)


def call_own(kind: str, name: str, given: Mapping[str, Any], context: Mapping[str, Any]) -> Any:
    """The result of the user's ``module:function`` for ``given`` and its parameters in ``context``."""
    function = import_named(kind, name, "my_module:load")
    if not callable(function):
        raise HoldfastError(f"{kind} {name!r}: expected a function, got {quoted(function)}")
    for key in given:
        if key in context:
            raise HoldfastError(f"{kind} {name!r}: {key!r} comes from the experiment, leave it out")
    signature = inspect.signature(function)
    arguments = {**given, **{key: value for key, value in context.items() if key in signature.parameters}}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HoldfastError(f"{kind} {name!r}: {error}; its signature is {signature}") from None
    return function(**arguments)


def divide(
    name: str, found: Dataset | TrainTest, rule: Callable[[], Partitioner] | None, *, nodes: int, seed: int
) -> NodesData:
    """``found``, whose name is ``name``, divided among ``nodes`` by ``rule()``, or as it is divided already.

    Without a rule, what is not divided yet is shuffled and divided evenly. A map-style Dataset may have the
    labels of its items in ``targets``, and the names of the classes in ``classes``, as those of torchvision.
    """
    if isinstance(found, Dataset):
        samples = (found.x_train, found.y_train)
        data = partition(*samples, (rule or IID)(), nodes=nodes, seed=seed, groups=found.groups)
        data = replace(data, class_names=found.class_names)
        test = Pair(found.x_test, found.y_test) if len(found.x_test) else None
        return NodesData(data, test, None, found.classes, found.mean, found.std)
    train = found.train
    if not isinstance(train, AnyData | Sequence) and is_dataset(train):
        parts = partition_dataset(
            train, (rule or IID)(), nodes, labels=getattr(train, "targets", None), seed=seed
        )
        classes = getattr(train, "classes", None)
        read = from_datasets(parts, classes=None if classes is None else len(classes))
        return NodesData.of(with_class_names(read, classes), found.test)
    if rule is not None:
        raise HoldfastError(f"problem.partition: {name} has divided the data already; leave partition out")
    if not isinstance(train, AnyData | Sequence) or isinstance(train, str):
        raise HoldfastError(
            f"dataset {name!r}: expected it to return hf.Dataset or hf.TrainTest, or data as hf.train takes "
            f"them, got {quoted(train)}"
        )
    divided = as_data(train)
    if divided.nodes != nodes:
        raise HoldfastError(
            f"dataset {name!r}: it split the data over {divided.nodes} nodes, but problem.nodes is {nodes}"
        )
    return NodesData.of(divided, found.test)
