"""Sources whose batches are read on the host when a step asks for them: data sets and streams."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from copy import copy
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream as Purpose
from holdfast.core.randomness import Word, philox
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.federated import FederatedData
from holdfast.data.lazy import AnyData, LazyData, Part, Stream
from holdfast.data.samples import describe, described, targets_of
from holdfast.problem.sampling import (
    Sampling,
    SamplingName,
    Shuffle,
    WholeBatches,
    build_sampling,
    drawn_by,
    weights_of,
)
from holdfast.problem.source import (
    ArraySource,
    Batch,
    InputTransform,
    Source,
    Weighting,
    scale_of,
    weight_of_one,
)

# --- batches read on the host, in this process or by others, and ahead of the step that needs them ------


Group = tuple[Part, ...]  # what is read in one go: parts with as many rows
ReadPart = Callable[[Part], Any]


class BatchReader:
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
        """Lets other processes read what is most likely needed next; without any it does nothing."""
        if not self.workers:
            return
        for wrong in self._ahead.values():
            wrong.cancel()
        self._ahead = {group: self._submit(group) for group in groups}

    def _submit(self, group: Group) -> Future[Any]:
        if self._pool is None:
            # Forked where possible, as by torch's loaders, so that data sets need not be sent.
            ways = multiprocessing.get_all_start_methods()
            context = multiprocessing.get_context("fork" if "fork" in ways else "spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, _start, (self.read,))
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        return self._pool.submit(_read_there, group)


def read_group(read: ReadPart, group: Group) -> Tree:
    """All parts in one tree [parts, rows, ...]."""
    trees = [read(part) for part in group]
    first = describe(trees[0])
    for part, tree in zip(group, trees, strict=True):
        if (own := describe(tree)) != first:
            raise HoldfastError(
                f"node {part.node}: a batch is {own} per sample, that of node {group[0].node} is {first}; "
                "nodes are computed together, so pad all batches to one shape"
            )
    return tree_map(lambda *columns: torch.stack(columns), *trees)


def joined(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """The trees of several groups as one."""
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


def _read_there(group: Group) -> Tree:
    assert _read is not None
    return read_group(_read, group)


# --- the source that reads so -----------------------------------------------------------------------------


# The round number of reads for evaluation: that of no round, so their random transforms are their own.
EVALUATION = 2**32 - 1
SOME = 64  # items whose targets are checked before training


class Schedule:
    """Which step most likely follows: the next of the round, which has as many steps as the last round."""

    def __init__(self) -> None:
        self._last, self._steps = (-1, -1), 2**31

    def after(self, round: int, step: int) -> tuple[int, int]:
        """The step after this one."""
        if (self._last[0] + 1, 0) == (round, step) and self._last[1] >= 0:
            self._steps = self._last[1] + 1
        self._last = (round, step)
        return (round, step + 1) if step + 1 < self._steps else (round + 1, 0)


class LazySource:
    """Samples that are read on the host when a step asks for them, and sent to the model's device.

    ``LazyData`` have the samples and numbers of an ``ArraySource``. A ``Stream`` has batches of its own size
    and no end, so nothing can read all samples of a node.
    """

    def __init__(
        self,
        data: LazyData | Stream,
        like: Tensor,
        *,
        seed: int = 0,
        batch_size: int | None = None,
        sampling: SamplingName = "replacement",
        weights: Weighting = "uniform",
        mean: float = 0.0,
        std: float = 1.0,
        reader: BatchReader | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "sampling": sampling}
        self._options |= {"weights": weights, "mean": mean, "std": std}
        self.data, self.like, self.seed, self.sampling = data, like, seed, sampling
        self.input_transform = InputTransform(like, mean, std)
        self.reader, self.schedule = reader or BatchReader(data), Schedule()
        self.nodes, self.description, self.finite = data.nodes, data.description, data.finite
        self.here = torch.as_tensor(data.here, device=like.device)
        self.counts = torch.as_tensor(data.counts)
        self.scale = scale_of(self.counts, weights, like.dtype)
        if isinstance(data, Stream):
            self._first_batch = data.read(self._parts(torch.as_tensor(data.here[:1]), 0, 0, [()], 0)[0])
            self.batch_size: int | None = len(next(leaves(self._first_batch)))
            self.draws: Sampling | None = WholeBatches(self.batch_size)
        else:
            self.batch_size = batch_size
            self.draws = build_sampling(sampling, seed, self.counts, batch_size)
        self._checks: list[Callable[[Tensor], None]] = []  # of targets that are read; copies share the list
        self._asked: tuple[Tensor, int, Tensor] | None = None

    @property
    def targets(self) -> Tensor | None:
        return targets_of(self.some(SOME).samples if self.finite else self._first_batch)

    def watch(self, check: Callable[[Tensor], None]) -> None:
        self._checks[:] = [check]

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        if isinstance(round, Tensor) or isinstance(step, Tensor):
            raise HoldfastError("samples are read on the host, step by step")
        there, draws = self._on_host(nodes), self.draws
        assert draws is not None

        def groups(round: int, step: int) -> list[Group]:
            items = [tuple(row) for row in draws.draw(there, round, step).places.tolist()]
            return self.reader.groups(self._parts(there, round, step, items, draws.width))

        trees = self.reader(groups(round, step))
        self.reader.prefetch(groups(*self.schedule.after(round, step)) if self.reader.workers else [])
        weight = weights_of(draws.draw(there, round, step), self.scale[there])
        samples = self._enter(joined(trees), by_node=True)
        return Batch(samples, self.input_transform.send(weight.contiguous()))

    def all_of(self, nodes: Tensor, at_once: int) -> Iterator[Batch]:
        self._check_end()
        there = nodes.cpu()
        counts, scale = self.counts[there].unsqueeze(-1), self.scale[there].unsqueeze(-1)
        size, longest = max(1, at_once // len(nodes)), int(counts.max())
        for first in range(0, longest, size):
            last = min(first + size, longest)
            weight = (torch.arange(first, last) < counts) * (scale / counts)
            parts = [
                self._part(node, range(min(first, count - 1), min(last, count)), last - first)
                for node, count in zip(there.tolist(), counts.flatten().tolist(), strict=True)
            ]
            trees = self.reader(self.reader.groups(parts))
            weight = weight.to(self.like.dtype).to(nodes.device)
            yield Batch(self._enter(joined(trees), by_node=True), weight)

    def everything(self, at_once: int) -> Iterator[Batch]:
        self._check_end()
        for node in self.here.tolist():
            count = int(self.counts[node])
            per_sample = float(self.scale[node]) / (self.nodes * count)
            for first in range(0, count, at_once):
                samples = self._items(node, range(first, min(first + at_once, count)))
                weight = self.like.new_full((len(next(leaves(samples))),), per_sample)
                yield Batch(self._enter(samples), weight)

    def some(self, count: int) -> Batch:
        samples = self._first(count)
        weight = self.like.new_ones(len(next(leaves(samples))))
        return Batch(self._enter(samples), weight)

    def samples(self, nodes: Tensor) -> int:
        return int(self.counts[nodes.cpu()].sum())

    def sample_weight(self, nodes: Tensor, of_all_data: bool = False) -> Tensor:
        there, size = nodes.cpu(), None if of_all_data else self.batch_size
        return weight_of_one(self.counts[there], self.scale[there], size).to(self.like)

    def test_set(self, samples: Tree) -> Tree:
        self.input_transform.check_alike(samples, described(self._first(1)))
        return self.input_transform.place(samples)

    def in_dtype(self, dtype: torch.dtype) -> LazySource:
        return LazySource(self.data, self.like.to(dtype), **self._options, reader=self.reader)

    def drawn_by(self, shuffle: Shuffle | None) -> LazySource:
        twin = copy(self)
        twin.draws = drawn_by(shuffle, self.draws)
        return twin

    def identity(self) -> None:
        return None  # what data sets hold is not known without reading them

    def _check_end(self) -> None:
        if not self.finite:
            raise HoldfastError(
                "a Stream has no end, so what reads all of a node's data (full gradients, exact solves, "
                "metrics such as train_loss) is not possible on it"
            )

    def _enter(self, samples: Tree, by_node: bool = False) -> Tree:
        """``samples`` [N, ...] on the device, their targets checked; ``by_node``: they are [m, B, ...]."""
        targets = targets_of(samples)
        if targets is not None:
            for check in self._checks:
                check(targets.flatten(0, 1) if by_node else targets)
        return self.input_transform.enter(samples)

    def _on_host(self, nodes: Tensor) -> Tensor:
        """``nodes`` [m] on the host, kept while the same are asked for: fetching them waits for a GPU."""
        if self._asked is None or self._asked[0] is not nodes or self._asked[1] != nodes._version:
            self._asked = (nodes, nodes._version, nodes.to("cpu", copy=True))
        return self._asked[2]

    def _first(self, count: int) -> Tree:
        """At most ``count`` samples of the first node here, on the host."""
        if not self.finite:
            return tree_map(lambda part: part[:count], self._first_batch)
        node = int(self.here[0])
        return self._items(node, range(min(count, int(self.counts[node]))))

    def _items(self, node: int, items: range) -> Tree:
        """The items of one node as evaluation sees them, [B, ...], on the host."""
        piece = -(-len(items) // max(1, self.reader.workers))
        pieces = [items[first : first + piece] for first in range(0, len(items), piece)]
        trees = self.reader([(self._part(node, own, len(own)),) for own in pieces])
        return tree_map(lambda part: part[0], joined(trees, dim=1))

    def _parts(
        self, nodes: Tensor, round: int, step: int, items: Sequence[tuple[int, ...]], rows: int
    ) -> list[Part]:
        """What each of ``nodes`` [m], which lie on the host, reads in a step."""
        seeds = philox((0, step, round, nodes), (self.seed, int(Purpose.TRANSFORM))).tolist()
        return [
            Part(node, round, step, own, (tuple(words),), rows)
            for node, words, own in zip(nodes.tolist(), seeds, items, strict=True)
        ]

    def _part(self, node: int, items: Sequence[int], rows: int) -> Part:
        """Items of a node for evaluation: their transforms depend on the item alone, and never change."""
        counter = (torch.tensor(list(items)), 0, EVALUATION, node)
        seeds = philox(counter, (self.seed, int(Purpose.TRANSFORM))).tolist()
        return Part(node, EVALUATION, 0, tuple(items), tuple(map(tuple, seeds)), rows)


# --- which source reads which kind of data --------------------------------------------------------------


def source_of(data: AnyData, like: Tensor, seed: int, word: Word, options: Any) -> Source:
    """``data`` as a source for a model like ``like``; ``word``: the seed, on the device where that helps.

    ``options``: see ``SourceOptions``.
    """
    if isinstance(data, FederatedData):
        return ArraySource(data, like, seed=word, **options)
    if isinstance(data, Stream):
        _check_stream(options)
    return LazySource(data, like, seed=seed, **options)


def _check_stream(options: Any) -> None:
    """Refuses options that a stream cannot have; its batches have a size of their own."""
    if options.get("batch_size", 0) is None:
        raise HoldfastError("batch_size = 'full': a Stream has no end; its function says how many samples")
    for name, default in (("weights", "uniform"), ("sampling", "replacement")):
        if options.get(name, default) != default:
            raise HoldfastError(f"{name} = {options[name]!r}: a Stream has no samples to count or draw from")
