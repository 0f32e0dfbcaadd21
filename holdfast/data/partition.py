"""Divides one data set among nodes. Every sample goes to at most one node; unused ones are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch.utils.data import Subset

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Count, NonNegative, Seed, Whole, check, check_fields
from holdfast.data.federated import FederatedData, no_empty_node
from holdfast.data.samples import (
    Pair,
    as_inputs,
    as_owners,
    as_targets,
    as_tree,
    items_in,
    same_length,
    targets_of,
)

# --- groups named by numbers or words, such as the hospital that a sample comes from --------------------


class Grouping(NamedTuple):
    """Which group each sample belongs to."""

    of_row: np.ndarray  # [N] int64: positions in ``names``
    names: tuple[str, ...]  # ascending, as numbers or as words

    @classmethod
    def of(cls, where: str, values: Any) -> Grouping:
        """``values`` [N] are whole numbers or words."""
        array = np.asarray(values) if not hasattr(values, "cpu") else values.cpu().numpy()
        if array.dtype.kind in "OUS" and array.ndim == 1:
            if wrong := [value for value in array.tolist() if not isinstance(value, str | int)]:
                raise HoldfastError(f"{where}: expected a name or a whole number each, got {wrong[0]!r}")
            array = array.astype(str)
        else:
            array = as_owners(where, array).numpy()
        names, of_row = np.unique(array, return_inverse=True)
        return cls(of_row.astype(np.int64), tuple(map(str, names.tolist())))

    def among(self, where: str, known: Sequence[str], do: str) -> np.ndarray:
        """[N] int64: positions of the rows' groups in ``known``; ``do``: what to do if one is not there."""
        for name in self.names:
            if name not in known:
                raise HoldfastError(f"{where}: {name!r} is not among {', '.join(map(repr, known))}; {do}")
        places: np.ndarray = np.array([list(known).index(name) for name in self.names], dtype=np.int64)
        return places.take(self.of_row)


# --- the rules by which one data set is divided among nodes: which node owns which sample ---------------


Concentration = Annotated[float, Field(gt=0)]  # may be infinite
DIRICHLET_REDRAWS = 20_000  # about a second


class Partitioner(ABC):
    """A rule that says which node owns which sample."""

    @abstractmethod
    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        """Row numbers of each node, [nodes] arrays; no row twice.

        ``labels`` are the N targets, ``groups`` the N natural owners if the data have any.
        """


PARTITIONERS: Registry[Partitioner] = Registry("partition")


@PARTITIONERS.register("iid")
@dataclass(frozen=True)
class IID(Partitioner):
    """Shuffled and divided evenly: node sizes differ by at most one sample.

    ``samples``, by default all, are drawn at random; the others stay unused.
    """

    samples: Count | None = None

    def __post_init__(self) -> None:
        check_fields("partition 'iid'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if self.samples is not None and self.samples > len(labels):
            raise HoldfastError(
                f"partition 'iid': samples = {self.samples}, but there are only {len(labels)}"
            )
        return np.array_split(rng.permutation(len(labels))[: self.samples], nodes)


@PARTITIONERS.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Each class divided by proportions from Dirichlet(h): small h, few classes per node; h = inf, equal.

    All proportions are redrawn until every node has ``min_samples``. With h = inf every node gets exactly the
    same number of samples of each class, and what does not divide evenly stays unused.
    """

    h: Concentration
    min_samples: Whole = 10

    def __post_init__(self) -> None:
        check_fields("partition 'dirichlet'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        classes = _rows_by_class("dirichlet", labels)
        shares = self._shares(np.array([len(rows) for rows in classes]), nodes, rng)
        pieces = [
            np.split(rng.permutation(rows), np.cumsum(share))[:nodes]
            for rows, share in zip(classes, shares, strict=True)
        ]
        return [np.concatenate(of_node) for of_node in zip(*pieces, strict=True)]

    def _shares(self, sizes: np.ndarray, nodes: int, rng: np.random.Generator) -> np.ndarray:
        """[classes, nodes]: how many samples of each class (``sizes`` [classes]) each node gets."""
        needed = f"partition 'dirichlet': {nodes} nodes with at least min_samples = {self.min_samples} each"
        if nodes * self.min_samples > sizes.sum():
            raise HoldfastError(
                f"{needed} need more than the {sizes.sum()} samples: lower min_samples or nodes"
            )
        if np.isinf(self.h):
            shares = np.repeat(sizes[:, None] // nodes, nodes, axis=1)
            if shares[:, 0].sum() < self.min_samples:
                raise HoldfastError(
                    f"{needed}: h = inf gives each only {shares[:, 0].sum()}; lower min_samples or nodes"
                )
            return shares
        for _ in range(DIRICHLET_REDRAWS):
            q = rng.dirichlet(np.full(nodes, self.h), size=len(sizes))
            cuts = np.rint(np.cumsum(q, axis=1) * sizes[:, None]).astype(np.int64)
            cuts[:, -1] = sizes
            shares = np.diff(cuts, axis=1, prepend=0)
            if shares.sum(axis=0).min() >= self.min_samples:
                return shares
        raise HoldfastError(
            f"{needed} did not come up in {DIRICHLET_REDRAWS} draws with h = {self.h}: "
            "raise h, or lower min_samples or nodes"
        )


@PARTITIONERS.register("shards")
@dataclass(frozen=True)
class Shards(Partitioner):
    """Sorted by label and cut into shards; each node draws a few of them, so it sees few labels."""

    per_node: Count = 2
    size: Count = 200

    def __post_init__(self) -> None:
        check_fields("partition 'shards'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        by_label = np.concatenate(_rows_by_class("shards", labels))
        shards = len(labels) // self.size
        wanted = nodes * self.per_node
        if wanted > shards:
            fitting = len(labels) // wanted
            hint = f"set size to at most {fitting}" if fitting else "use fewer nodes or a smaller per_node"
            raise HoldfastError(
                f"partition 'shards': {nodes} nodes x per_node = {self.per_node} need {wanted} shards, but "
                f"{len(labels)} samples make only {shards} of size {self.size}: {hint}"
            )
        stacked = by_label[: shards * self.size].reshape(shards, self.size)
        drawn = rng.permutation(shards)[:wanted].reshape(nodes, self.per_node)
        return [stacked[of_node].reshape(-1) for of_node in drawn]


@PARTITIONERS.register("classes-per-node")
@dataclass(frozen=True)
class ClassesPerNode(Partitioner):
    """Each node holds a fixed number of classes; a class is divided evenly among the nodes that hold it.

    One node after the other takes the classes that the fewest nodes hold so far, ties broken at random.
    """

    classes: Count = 1

    def __post_init__(self) -> None:
        check_fields("partition 'classes-per-node'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        where = "partition 'classes-per-node'"
        by_class = _rows_by_class("classes-per-node", labels)
        if self.classes > len(by_class):
            raise HoldfastError(
                f"{where}: classes = {self.classes}, but the data have only {len(by_class)} classes"
            )
        holders: list[list[int]] = [[] for _ in by_class]
        for node in range(nodes):
            held = [len(of_class) for of_class in holders]
            for taken in np.lexsort(np.array([rng.random(len(held)), held]))[: self.classes]:
                holders[taken].append(node)
        pieces: list[list[np.ndarray]] = [[] for _ in range(nodes)]
        for rows, of_class in zip(by_class, holders, strict=True):
            if len(rows) < len(of_class):
                raise HoldfastError(
                    f"{where}: class {labels[rows[0]]} has {len(rows)} samples for {len(of_class)} nodes: "
                    "use fewer nodes or classes"
                )
            if of_class:
                shuffled = np.array_split(rng.permutation(rows), len(of_class))
                for node, piece in zip(of_class, shuffled, strict=True):
                    pieces[node].append(piece)
        return [np.concatenate(of_node) for of_node in pieces]


@PARTITIONERS.register("groups")
@dataclass(frozen=True)
class NaturalGroups(Partitioner):
    """Each node gets the samples of a natural owner (writer, hospital); surplus owners are dealt round again.

    Owners in ascending order go to nodes 0, 1, ..., n-1, 0, 1, ...: with 100 owners and 90 nodes the first 10
    nodes have two each. Of more ``owners`` than are asked for, by default all, the later ones stay unused.
    """

    owners: Count | None = None

    def __post_init__(self) -> None:
        check_fields("partition 'groups'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        if groups is None:
            raise HoldfastError(
                "partition 'groups': these data do not say who owns which sample; use another partition, "
                "or data with group ids"
            )
        names, owner_of_row = np.unique(groups, return_inverse=True)
        if self.owners is not None and self.owners > len(names):
            raise HoldfastError(
                f"partition 'groups': owners = {self.owners}, but there are only {len(names)} groups"
            )
        owners = self.owners or len(names)
        if owners < nodes:
            raise HoldfastError(
                f"partition 'groups': {nodes} nodes but only {owners} groups: use at most that many"
            )
        rows = np.flatnonzero(owner_of_row < owners)
        node_of_row = owner_of_row[rows] % nodes
        ends = np.cumsum(np.bincount(node_of_row))
        return np.split(rows[np.argsort(node_of_row, kind="stable")], ends[:-1])


@PARTITIONERS.register("unequal")
@dataclass(frozen=True)
class Unequal(Partitioner):
    """Shuffled; log-normal node sizes, proportional to exp(sigma * N(0, 1)) and at least one sample."""

    sigma: NonNegative = 1.0

    def __post_init__(self) -> None:
        check_fields("partition 'unequal'", self)

    def assign(
        self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
    ) -> list[np.ndarray]:
        exponent = self.sigma * rng.standard_normal(nodes)
        weights = np.exp(exponent - exponent.max())
        # one sample for each node, the others by cumulative share
        ends = np.rint(np.cumsum(weights) / weights.sum() * (len(labels) - nodes)).astype(np.int64)
        cuts = (ends + np.arange(1, nodes + 1))[:-1]
        return np.split(rng.permutation(len(labels)), cuts)


def _rows_by_class(name: str, labels: np.ndarray) -> list[np.ndarray]:
    """The rows of each class that occurs, in ascending order of label."""
    if labels.shape[1:] == (0,):  # they are not known
        raise HoldfastError(
            f"partition {name!r} needs one class label per sample, and was given none: give y, or labels= to "
            "hf.partition_dataset; or use iid, unequal or groups"
        )
    if labels.ndim != 1:
        raise HoldfastError(
            f"partition {name!r} needs one class label per sample, got targets of shape "
            f"{list(labels.shape[1:])} per sample: use iid, unequal or groups"
        )
    if not np.array_equal(labels, np.round(labels)):
        raise HoldfastError(
            f"partition {name!r} needs class labels, but targets are real numbers: use iid, unequal or groups"
        )
    _, class_of_row, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return np.split(np.argsort(class_of_row, kind="stable"), np.cumsum(sizes)[:-1])


# --- divides one data set among nodes. Every sample goes to at most one node; unused ones are counted ---


def partition(
    x: Any, y: Any, how: Partitioner, nodes: int, seed: int = 0, groups: Any | None = None
) -> FederatedData:
    """Divides samples x [N, ...] and targets y [N, ...] (numpy or torch) among ``nodes`` as ``how`` says.

    x may be a dictionary or tuple of inputs; with ``y = None`` a dictionary of all columns, targets included,
    or ``FederatedData``, such as a whole frame, that are divided again.
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
    """The names of the nodes: those of the groups of which each consists."""
    assert owners is not None
    groups = [np.unique(owners.of_row[of_node]) for of_node in rows]
    return tuple(", ".join(owners.names[group] for group in of_node) for of_node in groups)
