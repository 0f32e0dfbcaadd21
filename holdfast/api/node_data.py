"""The data of ``hf.train``, ``hf.compare`` and ``hf.tune``: of nodes already, or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, check
from holdfast.data import NodesData, Partitioner, TrainTest
from holdfast.data.handed import as_data
from holdfast.data.lazy import AnyData
from holdfast.data.test_sets import Tests, read_tests
from holdfast.experiments.choices import Named, as_choice, as_partition
from holdfast.experiments.config import ProblemConfig
from holdfast.experiments.setting import named_data

NodeData = AnyData | Sequence[Any] | TrainTest | Named
"""What every node has, as ``hf.train`` takes it, also with a test set, or a name."""


def as_read(data: NodeData) -> AnyData | TrainTest | Named:
    """``data`` of nodes, read or looked at once; a name stays one."""
    if isinstance(data, TrainTest):
        return data._replace(train=as_data(data.train))
    return data if isinstance(data, str | Mapping) else as_data(data)


def nodes_data(
    data: NodeData,
    nodes: int | None,
    partition: Partitioner | Named | None,
    data_dir: str | Path | None,
    test: Tests | None,
    seed: int,
) -> NodesData:
    """``data`` and ``test``, which may come with a name; the arguments are those of ``hf.train``."""
    if not isinstance(data, str | Mapping):
        for name, value in (("nodes", nodes), ("partition", partition), ("data_dir", data_dir)):
            if value is not None:
                raise HoldfastError(
                    f"{name}: only for data by name, such as data='digits'; these are given for each node. "
                    "To divide samples: hf.partition"
                )
        train, own_test = data if isinstance(data, TrainTest) else (data, None)
        return NodesData.of(as_data(train), own_test if test is None else test)
    if isinstance(data, Mapping) and "name" not in data:
        raise HoldfastError(
            "data: a dictionary is for data by name, and has a key 'name'; of nodes with names give "
            "hf.from_datasets(list(data.values()), names=list(data))"
        )
    count = ProblemConfig.model_fields["nodes"].default if nodes is None else check("nodes", Count, nodes)
    folder = None if data_dir is None else Path(data_dir)
    rule = None if partition is None else lambda: as_partition(partition)
    given = named_data(as_choice("data", data), rule, nodes=count, seed=seed, data_dir=folder)
    if test is None:
        return given
    samples, counts = read_tests(test, given.train)
    return replace(given, test=samples, test_counts=counts)
