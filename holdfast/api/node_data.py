"""The data of ``hf.train``, ``hf.compare`` and ``hf.tune``: of nodes already, or by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, check
from holdfast.data import NodesData, Partitioner
from holdfast.data.handed import as_data
from holdfast.data.lazy import AnyData
from holdfast.data.test_sets import read_tests
from holdfast.experiments.choices import Named, as_choice, as_partition
from holdfast.experiments.config import ProblemConfig
from holdfast.experiments.setting import named_data

NodeData = AnyData | Sequence[Any] | Named
"""What every node has, as ``hf.train`` takes it, or a name."""


def as_read(data: NodeData) -> AnyData | Named:
    """``data`` of nodes, read or looked at once; a name stays one."""
    return data if isinstance(data, str | Mapping) else as_data(data)


def nodes_data(
    data: NodeData,
    nodes: int | None,
    partition: Partitioner | Named | None,
    data_dir: str | Path | None,
    test: Any,
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
        return NodesData.of(as_data(data), test)
    count = ProblemConfig.model_fields["nodes"].default if nodes is None else check("nodes", Count, nodes)
    folder = None if data_dir is None else Path(data_dir)
    rule = None if partition is None else lambda: as_partition(partition)
    given = named_data(as_choice("data", data), rule, nodes=count, seed=seed, data_dir=folder)
    if test is None:
        return given
    samples, counts = read_tests(test, given.train)
    return replace(given, test=samples, test_counts=counts)
