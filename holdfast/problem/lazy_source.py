"""Sources whose batches are read on the host when a step asks for them: data sets and streams."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from copy import copy
from typing import Any, NoReturn

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream as Purpose
from holdfast.core.randomness import Word, philox
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.lazy import AnyData, LazyData, Part, Stream
from holdfast.data.samples import describe, described, targets_of
from holdfast.problem.sampling import SamplingName, Shuffle, build_sampling, drawn_by, weights_of
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


def read_group(read: ReadPart, group: Group) -> Tree:
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


def joined(trees: Sequence[Tree], dim: int = 0) -> Tree:
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


def _read_there(group: Group) -> Tree:
    assert _read is not None
    return read_group(_read, group)


# --- sources whose batches are read on the host when a step asks for them: data sets and streams --------


# What is read for evaluation has the number of no round, and so random transforms of its own.
EVALUATION = 2**32 - 1
SOME = 64  # items whose targets are checked before training


class Schedule:
    """Which step most likely follows: the next of the round, whose number of steps the last round tells."""

    def __init__(self) -> None:
        self._last, self._steps = (-1, -1), 2**31

    def after(self, round: int, step: int) -> tuple[int, int]:
        """The step after this one."""
        if (self._last[0] + 1, 0) == (round, step) and self._last[1] >= 0:
            self._steps = self._last[1] + 1
        self._last = (round, step)
        return (round, step + 1) if step + 1 < self._steps else (round + 1, 0)


class HostSource:
    """What sources that are read on the host have in common: minibatches, and how they reach the device."""

    def __init__(self, input_transform: InputTransform, seed: int, reader: BatchReader) -> None:
        self.input_transform, self.seed, self.reader = input_transform, seed, reader
        self.schedule = Schedule()
        self.check: Callable[[Tensor], None] | None = None
        self._asked: tuple[Tensor, int, Tensor] | None = None

    def fetch(self, nodes: Tensor, round: Word, step: Word, items: Any, rows: int) -> Tree:
        """Samples [m, rows, ...] on the device; ``items`` (nodes, round, step) -> [m] tuples to read."""
        if isinstance(round, Tensor) or isinstance(step, Tensor):
            raise HoldfastError("samples are read on the host, step by step")
        there = self.on_host(nodes)
        numbers = there.tolist()

        def groups(round: int, step: int) -> Any:
            seeds = philox((0, step, round, there), (self.seed, int(Purpose.TRANSFORM))).tolist()
            picked = items(there, round, step)
            parts = [
                Part(node, round, step, own, (tuple(words),), rows)
                for node, words, own in zip(numbers, seeds, picked, strict=True)
            ]
            return self.reader.groups(parts)

        trees = self.reader(groups(round, step))
        self.reader.prefetch(groups(*self.schedule.after(round, step)) if self.reader.workers else [])
        return self.enter(joined(trees), by_node=True)

    def enter(self, samples: Tree, by_node: bool = False) -> Tree:
        """``samples`` [N, ...] on the device, their targets checked; ``by_node``: they are [m, B, ...]."""
        targets = targets_of(samples)
        if self.check is not None and targets is not None:
            self.check(targets.flatten(0, 1) if by_node else targets)
        return self.input_transform.enter(samples)

    def on_host(self, nodes: Tensor) -> Tensor:
        """``nodes`` [m] on the host, kept while the same are asked for: fetching them waits for a GPU."""
        if self._asked is None or self._asked[0] is not nodes or self._asked[1] != nodes._version:
            self._asked = (nodes, nodes._version, nodes.to("cpu", copy=True))
        return self._asked[2]

    def test_set(self, samples: Tree, own: Tree) -> Tree:
        """``samples`` where the model is, if they are like ``own``."""
        self.input_transform.check_alike(samples, described(own))
        return self.input_transform.place(samples)


class LazySource:
    """A data set per node; see ``LazyData`` and ``ArraySource``, whose samples and numbers are the same."""

    def __init__(
        self,
        data: LazyData,
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
        self.data, self.batch_size, self.like = data, batch_size, like
        self.sampling = sampling
        self.host = HostSource(InputTransform(like, mean, std), seed, reader or BatchReader(data))
        self.nodes, self.description, self.finite = data.nodes, data.description, True
        self.here = torch.as_tensor(data.here, device=like.device)
        self.counts = torch.as_tensor(data.counts)
        self.scale = scale_of(self.counts, weights, like.dtype)
        self.draws = build_sampling(sampling, seed, self.counts, batch_size)

    @property
    def width(self) -> int | None:
        return None if self.draws is None else self.draws.width

    @property
    def padded(self) -> bool:
        return self.draws is not None and self.draws.padded

    @property
    def targets(self) -> Tensor | None:
        return targets_of(self.some(SOME).samples)

    def watch(self, check: Callable[[Tensor], None]) -> None:
        self.host.check = check

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        draws = self.draws
        assert draws is not None

        def items(nodes: Tensor, round: int, step: int) -> list[tuple[int, ...]]:
            return [tuple(row) for row in draws.draw(nodes, round, step).places.tolist()]

        samples = self.host.fetch(nodes, round, step, items, draws.width)
        there = self.host.on_host(nodes)
        weight = weights_of(draws.draw(there, round, step), self.scale[there])
        return Batch(samples, self.host.input_transform.send(weight.contiguous()))

    def all_of(self, nodes: Tensor, at_once: int) -> Iterator[Batch]:
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
            trees = self.host.reader(self.host.reader.groups(parts))
            weight = weight.to(self.like.dtype).to(nodes.device)
            yield Batch(self.host.enter(joined(trees), by_node=True), weight)

    def everything(self, at_once: int) -> Iterator[Batch]:
        for node in self.here.tolist():
            count = int(self.counts[node])
            per_sample = float(self.scale[node]) / (self.nodes * count)
            for first in range(0, count, at_once):
                samples = self._items(node, range(first, min(first + at_once, count)))
                weight = self.like.new_full((len(next(leaves(samples))),), per_sample)
                yield Batch(self.host.enter(samples), weight)

    def some(self, count: int) -> Batch:
        node = int(self.here[0])
        samples = self._items(node, range(min(count, int(self.counts[node]))))
        weight = self.like.new_ones(len(next(leaves(samples))))
        return Batch(self.host.enter(samples), weight)

    def samples(self, nodes: Tensor) -> int:
        return int(self.counts[nodes.cpu()].sum())

    def sample_weight(self, nodes: Tensor, of_all_data: bool = False) -> Tensor:
        there, size = nodes.cpu(), None if of_all_data else self.batch_size
        return weight_of_one(self.counts[there], self.scale[there], size).to(self.like)

    def test_set(self, samples: Tree) -> Tree:
        own = self._items(int(self.here[0]), range(1))
        return self.host.test_set(samples, own)

    def prepared(self, stored: Tree, at_once: int) -> Iterator[Tree]:
        return self.host.input_transform.in_parts(stored, at_once)

    def in_dtype(self, dtype: torch.dtype) -> LazySource:
        return LazySource(self.data, self.like.to(dtype), **self._options, reader=self.host.reader)

    def drawn_by(self, shuffle: Shuffle | None) -> LazySource:
        twin = copy(self)
        twin.draws = drawn_by(shuffle, self.draws)
        return twin

    def identity(self) -> None:
        return None  # what data sets hold is not known without reading them

    def _items(self, node: int, items: range) -> Tree:
        """The items of one node as evaluation sees them, [B, ...], on the host."""
        piece = -(-len(items) // max(1, self.host.reader.workers))
        pieces = [items[first : first + piece] for first in range(0, len(items), piece)]
        trees = self.host.reader([(self._part(node, own, len(own)),) for own in pieces])
        return tree_map(lambda part: part[0], joined(trees, dim=1))

    def _part(self, node: int, items: Sequence[int], rows: int) -> Part:
        """Items of a node for evaluation: their transforms depend on the item alone, and never change."""
        counter = (torch.tensor(list(items)), 0, EVALUATION, node)
        seeds = philox(counter, (self.host.seed, int(Purpose.TRANSFORM))).tolist()
        return Part(node, EVALUATION, 0, tuple(items), tuple(map(tuple, seeds)), rows)


class StreamSource:
    """Batches that a function makes; there is no end of samples, so nothing can read them all."""

    padded = False
    finite = False
    sampling: SamplingName = "replacement"

    def __init__(
        self,
        data: Stream,
        like: Tensor,
        *,
        seed: int = 0,
        mean: float = 0.0,
        std: float = 1.0,
        reader: BatchReader | None = None,
    ) -> None:
        self.data, self.like = data, like
        self._options: dict[str, Any] = {"seed": seed, "mean": mean, "std": std}
        self.host = HostSource(InputTransform(like, mean, std), seed, reader or BatchReader(data))
        self.nodes, self.description = data.nodes, data.description
        self.here = torch.as_tensor(data.here, device=like.device)
        node = int(data.here[0])
        words = philox((0, 0, 0, node), (seed, int(Purpose.TRANSFORM))).tolist()
        self._first = data.read(Part(node, 0, 0, (), (tuple(words),), 0))
        self.batch_size: int | None = len(next(leaves(self._first)))

    @property
    def width(self) -> int | None:
        return self.batch_size

    @property
    def targets(self) -> Tensor | None:
        return targets_of(self._first)

    def watch(self, check: Callable[[Tensor], None]) -> None:
        self.host.check = check

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        assert self.batch_size is not None
        samples = self.host.fetch(nodes, round, step, lambda nodes, *_: [()] * len(nodes), self.batch_size)
        return Batch(samples, self.like.new_full((len(nodes), self.batch_size), 1 / self.batch_size))

    def all_of(self, nodes: Tensor, at_once: int) -> Iterator[Batch]:
        self._no_end()

    def everything(self, at_once: int) -> Iterator[Batch]:
        self._no_end()

    def some(self, count: int) -> Batch:
        samples = tree_map(lambda part: part[:count], self._first)
        return Batch(self.host.enter(samples), self.like.new_ones(len(next(leaves(samples)))))

    def samples(self, nodes: Tensor) -> int:
        return 0  # that could be counted

    def sample_weight(self, nodes: Tensor, of_all_data: bool = False) -> Tensor:
        self._no_end()

    def test_set(self, samples: Tree) -> Tree:
        return self.host.test_set(samples, self._first)

    def prepared(self, stored: Tree, at_once: int) -> Iterator[Tree]:
        return self.host.input_transform.in_parts(stored, at_once)

    def in_dtype(self, dtype: torch.dtype) -> StreamSource:
        return StreamSource(self.data, self.like.to(dtype), **self._options, reader=self.host.reader)

    def drawn_by(self, shuffle: Shuffle | None) -> StreamSource:
        self._no_end()

    def identity(self) -> None:
        return None

    @staticmethod
    def _no_end() -> NoReturn:
        raise HoldfastError(
            "a Stream has no end, so what reads all of a node's data (full gradients, exact solves, metrics "
            "such as train_loss) is not possible on it"
        )


# --- which source reads which kind of data --------------------------------------------------------------


def source_of(data: AnyData, like: Tensor, seed: int, word: Word, options: Any) -> Source:
    """``data`` as a source for a model like ``like``; ``word``: the seed, on the device where that helps.

    ``options``: see ``SourceOptions``.
    """
    if isinstance(data, LazyData):
        return LazySource(data, like, seed=seed, **options)
    if not isinstance(data, Stream):
        return ArraySource(data, like, seed=word, **options)
    if options.get("batch_size", 0) is None:
        raise HoldfastError("batch_size = 'full': a Stream has no end; its function says how many samples")
    for name, default in (("weights", "uniform"), ("sampling", "replacement")):
        if options.get(name, default) != default:
            raise HoldfastError(f"{name} = {options[name]!r}: a Stream has no samples to count or draw from")
    kept = {name: options[name] for name in ("mean", "std") if name in options}
    return StreamSource(data, like, seed=seed, **kept)
