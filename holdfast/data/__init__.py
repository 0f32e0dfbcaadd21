"""Data sets, and how they are divided among nodes."""

from __future__ import annotations

from holdfast.data import embedded, files, synthetic  # noqa: F401 - they register themselves
from holdfast.data.dataset import DATASETS, Dataset, prepare
from holdfast.data.federated import FederatedData
from holdfast.data.load import load_data
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
    "Partitioner",
    "Shards",
    "Unequal",
    "load_data",
    "partition",
    "partition_dataset",
    "prepare",
]
