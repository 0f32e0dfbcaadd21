"""Divides one data set among nodes. Every sample goes to at most one node; unused ones are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Count, Seed, check
from holdfast.data.arrays import as_targets, same_length
from holdfast.data.federated import FederatedData, no_empty_node
from holdfast.data.grouping import Grouping
from holdfast.data.items import items_in
from holdfast.data.partitioners import NaturalGroups, Partitioner
from holdfast.data.samples import Pair, as_inputs, as_tree, targets_of


def partition(
    x: Any, y: Any, how: Partitioner, nodes: int, seed: int = 0, groups: Any | None = None
) -> FederatedData:
    """Divides samples x [N, ...] and targets y [N, ...] (numpy or torch) among ``nodes`` as ``how`` says.

    x may be a dictionary or tuple of inputs; with ``y = None`` a dictionary of all columns, targets included,
    or ``FederatedData``, such as a whole frame, that are divided anew.
    ``groups`` [N]: the natural owner of every sample, whole numbers or words. If nodes are made of them,
    ``names`` of the result tells which.
    """
    whole = x if isinstance(x, FederatedData) and y is None else None
    if whole is not None:
        samples = whole.samples
    elif y is None:
        samples = as_tree("data", x)
    else:
        samples = Pair(as_inputs("x", x), as_targets("y", y))
        same_length(x=next(leaves(samples.x)), y=samples.y)
    labels, count = targets_of(samples), len(next(leaves(samples)))
    owners = None if groups is None else Grouping.of("groups", groups)
    rows = _rows(None if labels is None else labels.cpu().numpy(), count, how, nodes, seed, owners)
    index = torch.from_numpy(np.concatenate(rows))
    own = tree_map(lambda part: part[index.to(part.device)], samples)
    inputs, targets = own if isinstance(own, Pair) else (own, None)
    return FederatedData(
        inputs,
        targets,
        counts=np.array([len(of_node) for of_node in rows]),
        unused=count - len(index),
        names=_names(rows, owners) if isinstance(how, NaturalGroups) else None,
        table=None if whole is None or whole.table is None else replace(whole.table, node=None),
        class_names=None if whole is None else whole.class_names,
    )


def partition_dataset(
    dataset: Any, how: Partitioner, nodes: int, *, labels: Any = None, groups: Any = None, seed: int = 0
) -> list[Subset[Any]]:
    """Divides the items of a map-style Dataset as ``partition`` does samples: one part of it for each node.

    ``labels`` [N]: the class of every item, for partitions that go by classes.
    """
    count = items_in("dataset", dataset)
    owners = None if groups is None else Grouping.of("groups", groups)
    targets = None if labels is None else as_targets("labels", labels).cpu().numpy()
    return [Subset(dataset, own.tolist()) for own in _rows(targets, count, how, nodes, seed, owners)]


def _rows(
    labels: np.ndarray | None, count: int, how: Partitioner, nodes: int, seed: int, owners: Grouping | None
) -> list[np.ndarray]:
    """Row numbers of each node, checked."""
    check("partition: nodes", Count, nodes)
    check("partition: seed", Seed, seed)
    if not isinstance(how, Partitioner):
        raise HoldfastError(f"partition: how should be a Partition such as Dirichlet(0.1), got {how!r}")
    for name, column in (("labels", labels), ("groups", None if owners is None else owners.of_row)):
        if column is not None and len(column) != count:
            raise HoldfastError(f"lengths differ: x has {count}, {name} has {len(column)}")
    if nodes > count:
        raise HoldfastError(f"{nodes} nodes but only {count} samples: use at most {count} nodes")
    known = np.empty((count, 0)) if labels is None else labels
    rows = how.assign(known, None if owners is None else owners.of_row, nodes, np.random.default_rng(seed))
    no_empty_node(np.array([len(own) for own in rows]))
    order = np.concatenate(rows)
    if len(rows) != nodes or len(np.unique(order)) != len(order):
        raise HoldfastError(
            f"{how!r} gave a sample to two nodes, or not one set of rows to each of {nodes} nodes"
        )
    return rows


def _names(rows: list[np.ndarray], owners: Grouping | None) -> tuple[str, ...]:
    """What nodes are called: the names of the groups that each consists of."""
    assert owners is not None
    groups = [np.unique(owners.of_row[of_node]) for of_node in rows]
    return tuple(", ".join(owners.names[group] for group in of_node) for of_node in groups)
