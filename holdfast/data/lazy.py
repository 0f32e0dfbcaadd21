"""Data that are read when they are drawn: a map-style data set per node, or a function that makes batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.generators import generators_kept, seed_generators
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.core.validation import Count, Whole, check
from holdfast.data.federated import FederatedData, no_empty_node
from holdfast.data.samples import as_tree, inputs_of, items_in, read_items, stack_items

Collate = Callable[[list[Any]], Any]


class Part(NamedTuple):
    """A request for samples of one node."""

    node: int
    round: int
    step: int
    items: tuple[int, ...]  # of a data set
    seeds: tuple[tuple[int, ...], ...]  # four words for the generators: one for all items, or one for each
    rows: int  # so many rows are returned: the last sample is repeated


@dataclass(frozen=True, eq=False, repr=False)
class LazyData:
    """A map-style data set per node. Items are read whenever they are drawn, with new random transforms.

    While a batch is read, the global generators of Python, numpy and torch are seeded for (seed, node, round,
    step), so that it is the same in every engine and after a resume.
    ``collate_fn``: turns a list of items into a pair (x, y) or a dictionary of tensors; by default items are
    stacked. ``workers``: processes that read, also ahead of the step; 0: batches are read here.
    """

    datasets: Sequence[Any]
    """Of the nodes that are held here."""
    collate_fn: Collate | None = None
    workers: int = 0
    names: tuple[str, ...] | None = None
    held: np.ndarray | None = None
    """[m] int64, ascending: the nodes whose data sets are here; None: all."""
    everywhere: np.ndarray | None = None
    """[n] int64, with ``held``: items of each node, 0 of one held elsewhere where that is not known."""
    why: str = "as asked for"
    unused: int = 0
    classes: int | None = None
    """How many there are, if that is known: it would take reading everything."""
    bytes_everywhere = numbers_everywhere = numbers = 0  # in memory
    finite = True
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        check("workers", Whole, self.workers)
        check("classes", Count | None, self.classes)
        nodes = range(len(self.datasets)) if self.held is None else self.held.tolist()
        parts = zip(nodes, self.datasets, strict=True)
        lengths = np.array([items_in(f"node {i}", dataset) for i, dataset in parts], dtype=np.int64)
        no_empty_node(lengths)
        if self.held is not None:
            assert self.everywhere is not None
            own, lengths = lengths, self.everywhere.copy()
            lengths[self.held] = own
        object.__setattr__(self, "counts", lengths)

    def __repr__(self) -> str:
        where = f"{self.nodes} nodes" if self.held is None else f"{len(self.held)} of {self.nodes} nodes"
        return f"LazyData({len(self)} samples on {where}; {self.description})"

    def __len__(self) -> int:
        """Samples of the nodes that are held here."""
        return int(self.counts[self.here].sum())

    @property
    def nodes(self) -> int:
        """Number of nodes, n."""
        return len(self.counts)

    @property
    def here(self) -> np.ndarray:
        """[m] int64: the nodes that are held here."""
        return np.arange(self.nodes) if self.held is None else self.held

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample; () if samples have several inputs."""
        return shape_of_inputs(self.first(1))

    def hold(self, nodes: Sequence[int]) -> LazyData:
        """The same federation with only the data sets of ``nodes`` here."""
        held = np.unique(np.asarray(nodes, dtype=np.int64))
        own = [self.datasets[row] for row in np.searchsorted(self.here, held).tolist()]
        return replace(self, datasets=own, held=held, everywhere=self.counts)

    def at_site(self, node: int, counts: np.ndarray) -> LazyData:
        """The data set of a single node, as that of ``node`` among nodes with ``counts`` [n] items."""
        return replace(self, held=np.array([node]), everywhere=counts)

    @property
    def description(self) -> str:
        """Where samples come from, in words."""
        by = {0: "", 1: " by a process"}.get(self.workers, f" by {self.workers} processes")
        return f"items read{by} when they are drawn, {self.why}"

    def read(self, part: Part) -> Tree:
        """The items as a tree of tensors [rows, ...]."""
        dataset, where = self.datasets[int(np.searchsorted(self.here, part.node))], f"node {part.node}"
        with generators_kept():
            try:
                if len(part.seeds) == 1:
                    seed_generators(part.seeds[0])
                    samples = self._collated(where, read_items(where, dataset, part.items))
                else:
                    items = []
                    for item, words in zip(part.items, part.seeds, strict=True):
                        seed_generators(words)
                        items += read_items(where, dataset, [item])
                    samples = self._collated(where, items)
            except HoldfastError:
                raise
            except Exception as error:  # the user's own code
                items_read = ", ".join(map(str, part.items[:4])) + (", ..." if len(part.items) > 4 else "")
                raise HoldfastError(
                    f"{where}: reading items {items_read} fails: {type(error).__name__}: {error}"
                ) from error
        return with_rows(samples, len(part.items), part.rows, where)

    def first(self, count: int, node: int | None = None) -> Tree:
        """The first ``count`` items, or as many as there are, of a node; None: of the first that is here."""
        node = int(self.here[0]) if node is None else node
        items = tuple(range(min(count, int(self.counts[node]))))
        return self.read(Part(node, 0, 0, items, ((0, 0, 0, 0),), len(items)))

    def known_by(self) -> dict[str, Any]:
        """What identifies these data without reading them all: sizes and every node's first item."""
        kinds = [type(dataset).__qualname__ for dataset in self.datasets]
        first = [tuple(leaves(self.first(1, node))) for node in self.here.tolist()]
        return {"counts": self.counts, "kinds": kinds, "first": first, "collate_fn": self.collate_fn}

    def _collated(self, where: str, items: list[Any]) -> Tree:
        return as_tree(
            where, stack_items(where, items) if self.collate_fn is None else self.collate_fn(items)
        )


@dataclass(frozen=True, eq=False)
class Stream:
    """Data without an end: ``batch(node, round, step)`` makes what a node sees in a step.

    It returns a pair (x, y) or a dictionary of tensors, always of the same number of samples. It may draw
    from the global generators of Python, numpy and torch, which are seeded for (seed, node, round, step).
    ``workers``: processes that make batches, also ahead of the step.
    """

    nodes: int
    batch: Callable[[int, int, int], Any]
    workers: int = 0
    names: tuple[str, ...] | None = None
    held: np.ndarray | None = None
    """[m] int64, ascending: the nodes for which batches are made here; None: all."""
    classes: int | None = None
    """How many there are, if that is known."""
    unused: int = 0
    bytes_everywhere = numbers_everywhere = numbers = 0  # in memory
    finite = False
    description = "batches made by a function of (node, round, step)"

    def __post_init__(self) -> None:
        check("nodes", Count, self.nodes)
        check("workers", Whole, self.workers)
        check("batch", Callable[..., Any], self.batch)

    def __repr__(self) -> str:
        return f"Stream(for {self.nodes} nodes, {self.description})"

    def __len__(self) -> int:
        """0: samples of a stream are not counted."""
        return 0

    @property
    def counts(self) -> np.ndarray:
        """[n] int64: the same for each node."""
        return np.zeros(self.nodes, dtype=np.int64)

    @property
    def here(self) -> np.ndarray:
        """[m] int64: the nodes for which batches are made here."""
        return np.arange(self.nodes) if self.held is None else self.held

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample; () if samples have several inputs."""
        return shape_of_inputs(self.first(1))

    def hold(self, nodes: Sequence[int]) -> Stream:
        """The same stream, which makes batches for only ``nodes`` here."""
        return replace(self, held=np.unique(np.asarray(nodes, dtype=np.int64)))

    def at_site(self, node: int, counts: np.ndarray) -> Stream:
        """The stream as ``node`` sees it, among as many nodes as there are ``counts``."""
        return replace(self, nodes=len(counts), held=np.array([node]))

    def first(self, count: int) -> Tree:
        """At most ``count`` samples, to see what they are like: of the first batch of the first node here."""
        made = self.read(Part(int(self.here[0]), 0, 0, (), ((0, 0, 0, 0),), 0))
        return tree_map(lambda part: part[:count], made)

    def known_by(self) -> dict[str, Any]:
        """What identifies this stream."""
        return {"nodes": self.nodes, "batch": self.batch}

    def read(self, part: Part) -> Tree:
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


def shape_of_inputs(samples: Tree) -> tuple[int, ...]:
    """Shape of one sample; () if samples have several inputs."""
    inputs = inputs_of(samples)
    return tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else ()


def with_rows(samples: Tree, expected: int, rows: int, where: str) -> Tree:
    """``samples``, which must be as many as ``expected``, with the last repeated up to ``rows``."""
    given = len(next(leaves(samples)))
    if given != expected:
        raise HoldfastError(f"{where}: a batch has {given} samples; expected {expected}")
    if rows <= given:
        return samples
    places = torch.arange(rows).clamp(max=given - 1)
    return tree_map(lambda part: part.index_select(0, places), samples)
