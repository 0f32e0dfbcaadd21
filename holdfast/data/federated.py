"""The data of nodes, as engines want them: one tensor, each node a run of rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from holdfast.core.errors import HoldfastError
from holdfast.data.arrays import as_samples, as_targets, labels_below, same_length

ITEMS_READ_AGAIN = 8  # of a Dataset: a transform that changes every second item is noticed too


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Nodes' samples in one tensor: node i owns rows ``starts[i] : starts[i] + counts[i]``.

    Where the nodes are spread over processes, each holds the samples of its own nodes only.
    """

    x: Tensor
    """[N, ...] uint8, float32 or float64."""
    y: Tensor
    """[N] int64 class labels, or float targets."""
    counts: np.ndarray
    """[n] int64: samples of each node, at least one; of a node held elsewhere 0 if that is not known."""
    unused: int = 0
    """Samples of the original data that no node got."""
    held: np.ndarray | None = None
    """[m] int64, ascending: the nodes whose samples are here; None: all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", as_samples("x", self.x))
        object.__setattr__(self, "y", as_targets("y", self.y))
        object.__setattr__(self, "counts", np.asarray(self.counts, dtype=np.int64))
        same_length(x=self.x, y=self.y)
        if self.counts.ndim != 1 or len(self.counts) == 0:
            raise HoldfastError(f"counts: expected one number per node, got shape {list(self.counts.shape)}")
        if self.held is not None:
            object.__setattr__(self, "held", np.asarray(self.held, dtype=np.int64))
        here = self.counts[self.here]
        no_empty_node(here)
        if here.sum() != len(self.x):
            raise HoldfastError(f"counts: they sum to {here.sum()}, but there are {len(self.x)} samples")

    @property
    def nodes(self) -> int:
        """Number of nodes, n."""
        return len(self.counts)

    @property
    def classes(self) -> int | None:
        """One more than the largest label of the samples here; None if targets are real numbers."""
        return None if self.y.is_floating_point() else int(self.y.max()) + 1

    @property
    def here(self) -> np.ndarray:
        """[m] int64: the nodes whose samples are here."""
        return np.arange(self.nodes) if self.held is None else self.held

    @property
    def starts(self) -> np.ndarray:
        """[n] int64: first row of each node; -1 for nodes held elsewhere."""
        starts = np.full(self.nodes, -1)
        starts[self.here] = np.concatenate([[0], np.cumsum(self.counts[self.here])[:-1]])
        return starts

    def hold(self, nodes: Sequence[int]) -> FederatedData:
        """The same federation with only the samples of ``nodes`` here (a copy)."""
        held = np.unique(np.asarray(nodes, dtype=np.int64))
        rows = torch.as_tensor(np.flatnonzero(np.isin(self.owners, held)))
        return replace(self, x=self.x[rows], y=self.y[rows], held=held)

    @property
    def owners(self) -> np.ndarray:
        """[N] int64: the node of each sample."""
        return np.repeat(self.here, self.counts[self.here])

    def node(self, i: int) -> tuple[Tensor, Tensor]:
        """Samples and targets of node ``i``, which must be here (views, not copies)."""
        if not 0 <= i < self.nodes:
            raise HoldfastError(f"node {i} does not exist: expected 0..{self.nodes - 1}")
        if i not in self.here:
            raise HoldfastError(f"node {i} is held elsewhere; here are {self.here.tolist()}")
        rows = slice(int(self.starts[i]), int(self.starts[i] + self.counts[i]))
        return self.x[rows], self.y[rows]

    def label_table(self, classes: int) -> np.ndarray:
        """[n, classes] int64: how many samples of each class each node owns."""
        if self.y.is_floating_point():
            raise HoldfastError("the targets are real numbers: a table of labels needs integer class labels")
        labels_below("y", self.y, classes)
        cells = np.bincount(self.owners * classes + self.y.cpu().numpy(), minlength=self.nodes * classes)
        return cells.reshape(self.nodes, classes)

    @classmethod
    def of_nodes(cls, parts: Sequence[tuple[Any, Any] | TorchDataset[Any]]) -> FederatedData:
        """From what each node owns: a pair (x, y) of arrays or tensors, or a map-style torch Dataset.

        A torch Dataset is read once, so random transforms in it are drawn once; then there is a warning.
        """
        expected = "expected a list with one (x, y) pair or torch Dataset per node"
        if not isinstance(parts, Sequence):
            raise HoldfastError(f"data: {expected}, got {type(parts).__name__}")
        if len(parts) == 0:
            raise HoldfastError(f"data: there is no node; {expected}")
        pairs = [as_pair(f"node {i}", part) for i, part in enumerate(parts)]
        for i, (part, pair) in enumerate(zip(parts, pairs, strict=True)):
            if warn_if_random(f"node {i}", part, pair):
                break  # the other nodes' transforms are most likely the same
        no_empty_node(np.array([len(x) for x, _ in pairs]))
        for which, name in enumerate(("x", "y")):
            first = pairs[0][which]
            for i, pair in enumerate(pairs):
                if pair[which].shape[1:] != first.shape[1:] or pair[which].dtype != first.dtype:
                    raise HoldfastError(
                        f"node {i}: {name} is {pair[which].dtype} {list(pair[which].shape[1:])} per sample, "
                        f"that of node 0 is {first.dtype} {list(first.shape[1:])}"
                    )
        x = torch.cat([x for x, _ in pairs])
        y = torch.cat([y for _, y in pairs])
        return cls(x, y, np.array([len(part) for part, _ in pairs]))


def no_empty_node(counts: np.ndarray) -> None:
    """Complains, naming the first one, if a node has no sample."""
    empty = np.flatnonzero(counts < 1)
    if len(empty):
        raise HoldfastError(
            f"node {empty[0]} has no samples ({len(empty)} of {len(counts)} nodes are empty): use fewer "
            "nodes, more data or another partition"
        )


def as_pair(where: str, part: Any) -> tuple[Tensor, Tensor]:
    """Samples and targets of a pair (x, y) or a map-style torch Dataset, checked."""
    if isinstance(part, TorchDataset):
        if isinstance(part, IterableDataset) or not hasattr(part, "__len__"):
            raise HoldfastError(f"{where}: an iterable torch Dataset has no length; expected a map-style one")
        part = _stack(where, part)
    if not (isinstance(part, (tuple, list)) and len(part) == 2):
        raise HoldfastError(f"{where}: expected a pair (x, y) or a torch Dataset, got {type(part).__name__}")
    x, y = as_samples(f"{where}, x", part[0]), as_targets(f"{where}, y", part[1])
    same_length(**{f"{where}, x": x, f"{where}, y": y})
    return x, y


def warn_if_random(where: str, part: Any, pair: tuple[Tensor, Tensor]) -> bool:
    """Warns if ``part`` is a torch Dataset whose items are not what they were when ``pair`` was read."""
    if not isinstance(part, TorchDataset):
        return False
    for i, (x, y) in enumerate(zip(pair[0][:ITEMS_READ_AGAIN], pair[1], strict=False)):
        item = part[i]
        if not (_alike(item[0], x) and _alike(item[1], y)):
            warnings.warn(
                f"{where}: item {i} of the Dataset differs on a second read. Items are read once, before "
                "training, so random transforms are drawn once and frozen. Leave them out, or give several "
                "transformed copies of the samples",
                UserWarning,
                stacklevel=2,
            )
            return True
    return False


def _alike(again: Any, kept: Tensor) -> bool:
    value = again.detach() if isinstance(again, Tensor) else torch.as_tensor(np.asarray(again))
    return value.shape == kept.shape and torch.equal(value.to(kept), kept)


def _stack(where: str, dataset: Any) -> tuple[Any, Any]:
    """All items (x, y) of a map-style torch Dataset as two arrays or tensors."""
    columns: tuple[list[Any], list[Any]] = ([], [])
    for i in range(len(dataset)):
        item = dataset[i]
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise HoldfastError(f"{where}: item {i} is {type(item).__name__}; expected a pair (x, y)")
        columns[0].append(item[0])
        columns[1].append(item[1])
    if not columns[0]:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    try:
        x, y = (
            torch.stack(column)
            if isinstance(column[0], Tensor)
            else np.stack([np.asarray(v) for v in column])
            for column in columns
        )
    except (TypeError, ValueError, RuntimeError):
        raise HoldfastError(
            f"{where}: the items are not tensors or arrays of one shape; convert them"
        ) from None
    return x, y
