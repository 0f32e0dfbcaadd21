"""Data sets, and how they are divided among nodes."""

from __future__ import annotations

from holdfast.data import builtin, files, images, tables  # noqa: F401 - they register themselves
from holdfast.data.dataset import DATASETS, Dataset, TrainTest, prepare
from holdfast.data.federated import FederatedData
from holdfast.data.load import NodesData, divide, load_data
from holdfast.data.partition import (
    IID,
    PARTITIONERS,
    ClassesPerNode,
    Dirichlet,
    NaturalGroups,
    Partitioner,
    Shards,
    Unequal,
    partition,
    partition_dataset,
)

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONERS",
    "ClassesPerNode",
    "Dataset",
    "Dirichlet",
    "FederatedData",
    "NaturalGroups",
    "NodesData",
    "Partitioner",
    "Shards",
    "TrainTest",
    "Unequal",
    "divide",
    "load_data",
    "partition",
    "partition_dataset",
    "prepare",
]
