"""Data as users give them: one part per node, read once or whenever items are drawn."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.generators import DrawsWatched, generators_kept
from holdfast.core.memory import available_memory
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.core.validation import check
from holdfast.data.federated import ITEMS_READ_AGAIN, FederatedData, alike, read_samples, warn_if_random
from holdfast.data.lazy import AnyData, Collate, LazyData, Part
from holdfast.data.samples import as_tree, is_dataset, items_in, read_items, stack_items
from holdfast.data.tables import divided, from_frame, is_table

if TYPE_CHECKING:
    import pandas
    from torch.utils.data import Dataset


# --- data as users give them: one part per node, read once or whenever items are drawn ------------------


# The share of free memory that items of Datasets may take if they are read at once.
SHARE_FOR_ITEMS = 0.25


class _Rows:
    """Samples in memory as a data set of items."""

    def __init__(self, samples: Tree) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(next(leaves(self.samples)))

    def __getitem__(self, row: int) -> Any:
        return tree_map(lambda part: part[row], self.samples)


def from_datasets(
    datasets: Sequence[Any],
    *,
    collate_fn: Collate | None = None,
    workers: int = 0,
    streaming: bool | None = None,
    names: Sequence[str] | None = None,
    classes: int | None = None,
) -> FederatedData | LazyData:
    """One map-style data set (torch, Hugging Face), pair (x, y) or dictionary per node, ready for ``train``.

    Items that are the same on every read and fit into a quarter of the free memory are read once; otherwise
    they are read when they are drawn, with new random transforms for every batch. ``streaming``: True
    reads when drawn, False reads once. ``collate_fn`` and ``workers`` are for items that are read when drawn,
    see ``LazyData``. ``classes``: how many there are, which a model by name has to know.
    """
    check("names", Sequence[str] | None, names)
    if not isinstance(datasets, Sequence) or not any(map(is_dataset, datasets)) or streaming is False:
        if collate_fn is not None or workers or streaming:
            raise HoldfastError("collate_fn, workers, streaming: only for Datasets that are read when drawn")
        data = FederatedData.of_nodes(datasets)
        return data if names is None else replace(data, names=tuple(names))
    called = None if names is None else tuple(names)
    parts = [
        part if is_dataset(part) else _Rows(read_samples(f"node {i}", part))
        for i, part in enumerate(datasets)
    ]
    lazy = LazyData(parts, collate_fn, workers, called, classes=classes)
    asked = streaming or collate_fn is not None or workers > 0
    with generators_kept():
        why = "as asked for" if asked else _why_lazy(parts)
        if why is None:
            watch = DrawsWatched()
            data = FederatedData.of_nodes(parts)
            if not watch.drawn:
                description = "items of each Dataset read once into memory, as they are always the same"
                return FederatedData(data.x, data.y, data.counts, description=description, names=called)
            why = "as they are drawn at random"
    _warn_if_own_generator(lazy)
    return replace(lazy, why=why)


def as_data(data: AnyData | Sequence[Any]) -> AnyData:
    """``data`` themselves, divided among nodes if they were not yet, or made from one part per node."""
    if isinstance(data, FederatedData):
        return divided(data)
    return data if isinstance(data, AnyData) else from_datasets(data)


def with_class_names(data: FederatedData | LazyData, names: Sequence[Any] | None) -> FederatedData | LazyData:
    """``data`` with the names of their classes, if their labels are in memory and can be counted."""
    if names is None or not isinstance(data, FederatedData):
        return data
    return replace(data, class_names=tuple(map(str, names)))


def _why_lazy(parts: Sequence[Any]) -> str | None:
    """Why items cannot be read once, as far as the first ones show."""
    size = 0
    for node, part in enumerate(parts):
        count, where, watch = items_in(f"node {node}", part), f"node {node}", DrawsWatched()
        if count == 0:
            continue
        for i in range(min(ITEMS_READ_AGAIN, count)):
            once, again = (as_tree(where, stack_items(where, read_items(where, part, [i]))) for _ in range(2))
            if not alike(once, again, 0) or watch.drawn:
                return "as they are drawn at random"
        size += count * sum(t.numel() * t.element_size() for t in leaves(once))
    return "as they are too many for the memory" if size > SHARE_FOR_ITEMS * available_memory("cpu") else None


def _warn_if_own_generator(data: LazyData) -> None:
    """Warns if a batch differs on a second read although the global generators are seeded alike."""
    for node in range(data.nodes):
        items = tuple(range(min(ITEMS_READ_AGAIN, int(data.counts[node]))))
        part = Part(node, 0, 0, items, ((1, 2, 3, 4),), len(items))
        if not _equal(data.read(part), data.read(part)):
            warnings.warn(
                f"node {node}: items of the Dataset differ on a second read with the same seed. They draw "
                "from a generator of their own, so no run can be repeated or resumed: draw from the global "
                "one of torch, numpy or Python",
                UserWarning,
                stacklevel=3,
            )
            return


def _equal(one: Any, other: Any) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = list(zip(leaves(one), leaves(other), strict=True))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


# --- test samples: one set for all nodes, or one for each -----------------------------------------------


TestSamples: TypeAlias = "tuple[Any, Any] | Mapping[str, Any] | Dataset[Any]"
"""A pair (x, y), a dictionary of tensors or a map-style Dataset."""

Tests: TypeAlias = "TestSamples | Sequence[TestSamples] | FederatedData | pandas.DataFrame | str | Path"
"""What ``test=`` takes: one set, a set for each node, or a table that is read like the training data."""


def read_tests(test: Tests | None, data: AnyData) -> tuple[Any, list[int] | None]:
    """All test samples, or None; and the number of each node's own, if there is a set for every node.

    ``data`` are those for training: a frame is read as they were.
    """
    if test is None:
        return None, None
    if is_table(test):
        if not isinstance(data, FederatedData) or data.table is None:
            raise HoldfastError(
                "test: a table is read like the training data, and these are none of hf.from_frame; give "
                "(x, y)"
            )
        test = from_frame(test, like=data)
    if isinstance(test, FederatedData):
        sets = divided(test)
    elif isinstance(test, list) and not any(isinstance(part, Tensor | np.ndarray) for part in test):
        sets = FederatedData.of_nodes(test)
    else:
        samples = read_test("test", test)
        if not len(next(leaves(samples))):
            raise HoldfastError("test: there is no sample; leave test= out, or give some")
        return samples, None
    _check_words(sets, data)
    if isinstance(test, FederatedData) and sets.nodes == 1:
        return sets.samples, None
    if sets.nodes != data.nodes:
        raise HoldfastError(
            f"test: expected one set, or a list of {data.nodes}, one for each node, got {sets.nodes}"
        )
    return sets.samples, sets.counts.tolist()


def read_test(where: str, part: Any) -> Tree:
    """``read_samples``, with a warning if ``part`` is a Dataset with random transforms."""
    samples = read_samples(where, part)
    warn_if_random(where, part, samples)
    return samples


def _check_words(test: FederatedData, data: AnyData) -> None:
    """Refuses a frame that was read apart from the training data, in another way."""
    table, read = test.table, data.table if isinstance(data, FederatedData) else None
    if table is None or (read is None and not table.words):
        return
    do = "give the frame itself, test=frame, or read it by hf.from_frame(frame, like=data)"
    for column, words in table.words.items():
        if read is None or read.words.get(column) != words:
            raise HoldfastError(
                f"test: the words of column {column!r} were numbered apart from those for training; {do}"
            )
    if read is not None and read.inputs != table.inputs:
        raise HoldfastError(f"test: columns are {list(table.inputs)}, for training {list(read.inputs)}; {do}")
