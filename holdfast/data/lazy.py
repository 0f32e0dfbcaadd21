"""Data that are read when they are drawn: a map-style data set per node, or a function that makes batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.generators import DrawsWatched, generators_kept, seed_generators
from holdfast.core.memory import available_memory
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Count, Whole, check
from holdfast.data.federated import ITEMS_READ_AGAIN, FederatedData, alike, no_empty_node, read_samples
from holdfast.data.items import is_dataset, items_in, read_items, stack_items
from holdfast.data.samples import as_tree

# Of the memory that is free, what items of Datasets may take that are read at once.
SHARE_FOR_ITEMS = 0.25

Collate = Callable[[list[Any]], Any]


class Part(NamedTuple):
    """What is to be read of one node."""

    node: int
    round: int
    step: int
    items: tuple[int, ...]  # of a data set
    seeds: tuple[tuple[int, ...], ...]  # four words for the generators: one for all items, or one for each
    rows: int  # so many rows are returned: the last sample is repeated


@dataclass(frozen=True, eq=False)
class LazyData:
    """A map-style data set per node. Items are read whenever they are drawn, with transforms drawn anew.

    While a batch is read, the global generators of Python, numpy and torch are seeded for (seed, node, round,
    step), so that it is the same in every engine and after a resume.
    ``collate_fn``: turns a list of items into a pair (x, y) or a dictionary of tensors; by default items are
    stacked. ``workers``: processes that read, also ahead of the step; 0: batches are read here.
    """

    datasets: Sequence[Any]
    collate_fn: Collate | None = None
    workers: int = 0
    names: tuple[str, ...] | None = None
    held: np.ndarray | None = None
    """[m] int64, ascending: the nodes that are asked for here; None: all."""
    why: str = "as asked for"
    unused: int = 0
    bytes_everywhere = numbers_everywhere = numbers = 0  # in memory
    classes = None  # not known without reading everything
    finite = True
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        check("workers", Whole, self.workers)
        lengths = [items_in(f"node {i}", dataset) for i, dataset in enumerate(self.datasets)]
        object.__setattr__(self, "counts", np.array(lengths, dtype=np.int64))
        no_empty_node(self.counts)

    def __len__(self) -> int:
        """Samples of the nodes that are asked for here."""
        return int(self.counts[self.here].sum())

    @property
    def nodes(self) -> int:
        """Number of nodes, n."""
        return len(self.datasets)

    @property
    def here(self) -> np.ndarray:
        """[m] int64: the nodes that are asked for here."""
        return np.arange(self.nodes) if self.held is None else self.held

    @property
    def how(self) -> str:
        """Where samples come from, for people."""
        by = {0: "", 1: " by a process"}.get(self.workers, f" by {self.workers} processes")
        return f"items read{by} when they are drawn, {self.why}"

    def read(self, part: Part) -> Any:
        """The items as a tree of tensors [rows, ...]."""
        dataset, where = self.datasets[part.node], f"node {part.node}"
        with generators_kept():
            try:
                if len(part.seeds) == 1:
                    seed_generators(part.seeds[0])
                    samples = self._collated(where, read_items(dataset, part.items))
                else:
                    items = []
                    for item, words in zip(part.items, part.seeds, strict=True):
                        seed_generators(words)
                        items += read_items(dataset, [item])
                    samples = self._collated(where, items)
            except HoldfastError:
                raise
            except Exception as error:  # the user's own code
                items_read = ", ".join(map(str, part.items[:4])) + (", ..." if len(part.items) > 4 else "")
                raise HoldfastError(
                    f"{where}: reading items {items_read} fails: {type(error).__name__}: {error}"
                ) from error
        return with_rows(samples, len(part.items), part.rows, where)

    def known_by(self) -> dict[str, Any]:
        """What tells these data from others without reading them all: sizes and every node's first item."""
        parts = [Part(node, 0, 0, (0,), ((0, 0, 0, 0),), 1) for node in self.here.tolist()]
        kinds = [type(dataset).__qualname__ for dataset in self.datasets]
        first = [tuple(leaves(self.read(part))) for part in parts]
        return {"counts": self.counts, "kinds": kinds, "first": first, "collate_fn": self.collate_fn}

    def _collated(self, where: str, items: list[Any]) -> Any:
        return as_tree(
            where, stack_items(where, items) if self.collate_fn is None else self.collate_fn(items)
        )


@dataclass(frozen=True, eq=False)
class Stream:
    """Data without an end: ``batch(node, round, step)`` makes what a node sees in a step.

    It gives a pair (x, y) or a dictionary of tensors, always of as many samples. It may draw from the global
    generators of Python, numpy and torch, which are seeded for (seed, node, round, step).
    ``workers``: processes that make batches, also ahead of the step.
    """

    nodes: int
    batch: Callable[[int, int, int], Any]
    workers: int = 0
    names: tuple[str, ...] | None = None
    unused: int = 0
    bytes_everywhere = numbers_everywhere = numbers = 0  # in memory
    classes = None  # not known without reading everything
    finite = False
    how = "batches made by a function of (node, round, step)"

    def __post_init__(self) -> None:
        check("nodes", Count, self.nodes)
        check("workers", Whole, self.workers)
        check("batch", Callable[..., Any], self.batch)

    def __len__(self) -> int:
        """Samples that can be counted: none."""
        return 0

    @property
    def counts(self) -> np.ndarray:
        """[n] int64: the same of each node."""
        return np.zeros(self.nodes, dtype=np.int64)

    def known_by(self) -> dict[str, Any]:
        """What tells this stream from others."""
        return {"nodes": self.nodes, "batch": self.batch}

    def read(self, part: Part) -> Any:
        """The batch of (node, round, step)."""
        where = f"node {part.node}"
        with generators_kept():
            seed_generators(part.seeds[0])
            try:
                made = self.batch(part.node, part.round, part.step)
            except Exception as error:  # the user's own code
                raise HoldfastError(
                    f"{where}: batch({part.node}, {part.round}, {part.step}) fails: "
                    f"{type(error).__name__}: {error}"
                ) from error
        samples = as_tree(where, made)
        return with_rows(samples, part.rows or len(next(leaves(samples))), part.rows, where)


AnyData = FederatedData | LazyData | Stream


def with_rows(samples: Any, expected: int, rows: int, where: str) -> Any:
    """``samples``, which must be as many as ``expected``, with the last repeated up to ``rows``."""
    given = len(next(leaves(samples)))
    if given != expected:
        raise HoldfastError(f"{where}: a batch has {given} samples; expected {expected}")
    if rows <= given:
        return samples
    places = torch.arange(rows).clamp(max=given - 1)
    return tree_map(lambda part: part.index_select(0, places), samples)


class _Rows:
    """Samples in memory as a data set of items."""

    def __init__(self, samples: Any) -> None:
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
) -> FederatedData | LazyData:
    """One map-style data set (torch, Hugging Face), pair (x, y) or dictionary per node, ready for ``train``.

    Items that are the same on every read and fit into a quarter of the free memory are read once; otherwise
    they are read when they are drawn, with random transforms drawn anew for every batch. ``streaming``: True
    reads when drawn, False reads once. ``collate_fn`` and ``workers`` are for items that are read when drawn,
    see ``LazyData``.
    """
    check("names", Sequence[str] | None, names)
    if not isinstance(datasets, Sequence) or not any(map(is_dataset, datasets)) or streaming is False:
        if collate_fn is not None or workers or streaming:
            raise HoldfastError("collate_fn, workers, streaming: only for Datasets that are read when drawn")
        data = FederatedData.of_nodes(datasets)
        return data if names is None else _named(data, names)
    called = None if names is None else tuple(names)
    parts = [
        part if is_dataset(part) else _Rows(read_samples(f"node {i}", part))
        for i, part in enumerate(datasets)
    ]
    lazy = LazyData(parts, collate_fn, workers, called)
    asked = streaming or collate_fn is not None or workers > 0
    with generators_kept():
        why = "as asked for" if asked else _why_lazy(parts)
        if why is None:
            watch = DrawsWatched()
            data = FederatedData.of_nodes(parts)
            if not watch.drawn:
                how = "items of each Dataset read once into memory, as they are always the same"
                return FederatedData(data.x, data.y, data.counts, how=how, names=called)
            why = "as they are drawn at random"
    _warn_if_own_generator(lazy)
    return LazyData(parts, collate_fn, workers, called, why=why)


def as_data(data: AnyData | Sequence[Any]) -> AnyData:
    """``data`` themselves, or what is made of one part per node."""
    return data if isinstance(data, AnyData) else from_datasets(data)


def _named(data: FederatedData, names: Sequence[str]) -> FederatedData:
    return FederatedData(data.x, data.y, data.counts, how=data.how, names=tuple(names))


def _why_lazy(parts: Sequence[Any]) -> str | None:
    """Why items cannot be read once, as far as the first ones tell."""
    size = 0
    for node, part in enumerate(parts):
        count, where, watch = items_in(f"node {node}", part), f"node {node}", DrawsWatched()
        if count == 0:
            continue
        for i in range(min(ITEMS_READ_AGAIN, count)):
            once, again = (as_tree(where, stack_items(where, [part[i]])) for _ in range(2))
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
