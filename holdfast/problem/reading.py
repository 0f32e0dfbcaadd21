"""Batches read on the host, in this process or by others, and ahead of the step that needs them."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.data.lazy import LazyData, Part, Stream
from holdfast.data.samples import describe

Group = tuple[Part, ...]  # what is read in one go: parts with as many rows
ReadPart = Callable[[Part], Any]


class Reading:
    """Reads groups of parts, each into a tree of tensors [parts, rows, ...]."""

    def __init__(self, data: LazyData | Stream) -> None:
        self.read, self.workers = data.read, data.workers
        self._pool: ProcessPoolExecutor | None = None
        self._ahead: dict[Group, Future[Any]] = {}

    def groups(self, parts: Sequence[Part]) -> list[Group]:
        """``parts`` in as many groups as there are readers."""
        size = -(-len(parts) // max(1, self.workers))
        return [tuple(parts[first : first + size]) for first in range(0, len(parts), size)]

    def __call__(self, groups: Sequence[Group]) -> list[Any]:
        if not self.workers:
            return [read_group(self.read, group) for group in groups]
        futures = [self._ahead.pop(g) if g in self._ahead else self._submit(g) for g in groups]
        return [future.result() for future in futures]

    def prefetch(self, groups: Sequence[Group]) -> None:
        """Has other processes read what is most likely asked for next; nothing if there are none."""
        if not self.workers:
            return
        for wrong in self._ahead.values():
            wrong.cancel()
        self._ahead = {group: self._submit(group) for group in groups}

    def _submit(self, group: Group) -> Future[Any]:
        if self._pool is None:
            # Forked, where that is possible, so that data sets need not be sent, as torch's loaders do.
            ways = multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _start, (self.read,))
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool.submit(_read_there, group)


def read_group(read: ReadPart, group: Group) -> Any:
    """All parts, one below the other."""
    trees = [read(part) for part in group]
    first = describe(trees[0])
    for part, tree in zip(group, trees, strict=True):
        if (own := describe(tree)) != first:
            raise HoldfastError(
                f"node {part.node}: a batch is {own} per sample, that of node {group[0].node} is {first}; "
                "nodes are computed together, so pad all batches to one shape"
            )
    return tree_map(lambda *columns: torch.stack(columns), *trees)


def joined(trees: Sequence[Any], dim: int = 0) -> Any:
    """What several groups gave, as one tree."""
    try:
        return tree_map(lambda *columns: torch.cat(columns, dim=dim), *trees)
    except RuntimeError:
        forms = " and ".join(sorted({describe(tree) for tree in trees}))
        raise HoldfastError(
            f"batches differ in shape, {forms}; nodes are computed together, so pad all batches to one shape"
        ) from None


_read: ReadPart | None = None  # in a process that reads


def _start(read: ReadPart) -> None:
    global _read
    _read = read
    torch.set_num_threads(1)


def _read_there(group: Group) -> Any:
    assert _read is not None
    return read_group(_read, group)
