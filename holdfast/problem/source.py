"""Where batches come from: a source of every node's samples, and the one that holds them all in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word, batch_indices
from holdfast.core.tree import leaves, tree_map
from holdfast.data.dataset import prepare
from holdfast.data.federated import FederatedData
from holdfast.data.samples import Pair, described, map_inputs, targets_of

MOST_READY = 2**30  # bytes of samples that are prepared once, beside those that are stored
# On a CPU, drawing the minibatches of several steps takes hardly longer than those of one, if they are few.
STEPS_DRAWN_AT_ONCE = 16
PICKS_DRAWN_AT_ONCE = 2**15

Weighting = Literal["uniform", "samples"]


class Batch(NamedTuple):
    """Samples, ready for the model, and their weights in a sum of losses.

    For m nodes at once, all tensors have leading dimensions [m, B]; for one, [B].
    """

    samples: Any  # a tree of tensors; only the model and the loss look inside
    weight: Tensor


class Source(Protocol):
    """The samples of the nodes. Weights are such that the sum over a node's samples is its share of f_i."""

    nodes: int
    here: Tensor  # [k]: the nodes whose samples are in this process
    batch_size: int | None  # samples of a node in a step; None: all

    @property
    def targets(self) -> Tensor | None:
        """All targets here, if samples name them, which the loss checks before training."""

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        """What each of ``nodes`` [m] sees in a step: a function of (node, round, step) alone."""

    def all_of(self, nodes: Tensor, at_once: int) -> Iterator[Batch]:
        """All samples of ``nodes`` [m], some of every node at a time; shorter nodes are padded with weight 0.

        A batch has about ``at_once`` samples of all nodes together.
        """

    def everything(self, at_once: int) -> Iterator[Batch]:
        """All samples here, [B, ...], weighted so that their losses sum to the share of these nodes in f."""

    def some(self, count: int) -> Batch:
        """Any samples, [B, ...], to try a model on."""

    def samples(self, nodes: Tensor) -> int:
        """How many samples ``nodes`` hold together."""

    def test_set(self, samples: Any) -> Any:
        """``samples`` as stored ones, where the source has its own."""

    def prepared(self, stored: Any, at_once: int) -> Iterator[Any]:
        """Samples of a test set as in ``Batch.samples``, [B, ...]."""

    def in_dtype(self, dtype: torch.dtype) -> Source:
        """The same samples as numbers of another type."""

    def identity(self) -> tuple[list[object], list[Tensor]]:
        """All that the samples and weights depend on, for a hash."""


class ArraySource:
    """Samples of all nodes in one tree of tensors, gathered where the model is; drawn with replacement.

    ``weights = "uniform"`` counts every node alike (scale 1); ``"samples"`` counts every sample alike: then
    scale_i = n N_i / N, so that (1/n) sum_i f_i is the mean over all samples, whatever the method.
    ``like``: a tensor with the type and device of the model.
    """

    def __init__(
        self,
        data: FederatedData,
        like: Tensor,
        *,
        batch_size: int | None = None,
        seed: Word = 0,
        weights: Weighting = "uniform",
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.batch_size, self.seed, self.weights, self.mean, self.std = batch_size, seed, weights, mean, std
        self.nodes = data.nodes
        device, self.dtype = like.device, like.dtype
        self.given = described(data.samples)  # before targets take the model's number type
        self.stored = self._placed(data.samples, device)
        self.size = len(data)
        self.counts = torch.as_tensor(data.counts, device=device)
        self.starts = torch.as_tensor(data.starts, device=device)
        self.here = torch.as_tensor(data.here, device=device)
        self.scale = torch.ones(self.nodes, device=device, dtype=self.dtype)
        if weights == "samples":
            self.scale = (self.counts.double() * self.nodes / self.counts.sum()).to(self.dtype)
        self.prepare = partial(prepare, mean=mean, std=std, dtype=self.dtype)
        self._longest = int(data.counts.max())
        self._drawn: tuple[int, int, Tensor, Tensor] | None = None  # round, first step, nodes, their picks

    @property
    def targets(self) -> Tensor | None:
        return targets_of(self.stored)

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        assert self.batch_size is not None
        picks = self.picks(nodes, round, step)
        weight = self.scale.index_select(0, nodes).div_(self.batch_size).unsqueeze(-1).expand(picks.shape)
        return Batch(self.gather(self.starts.index_select(0, nodes).unsqueeze(-1) + picks), weight)

    def all_of(self, nodes: Tensor, at_once: int) -> Iterator[Batch]:
        counts, starts, scale = self.counts[nodes], self.starts[nodes], self.scale[nodes]
        size = max(1, at_once // len(nodes))
        # For all nodes the maximum is precomputed: reading it from a GPU would synchronise.
        longest = self._longest if len(nodes) == self.nodes else int(counts.max())
        for first in range(0, longest, size):
            last = min(first + size, longest)
            place = torch.arange(first, last, device=counts.device)
            inside = place < counts.unsqueeze(-1)
            weight = (inside * (scale / counts).unsqueeze(-1)).to(self.dtype)
            rows = starts.unsqueeze(-1) + torch.minimum(place, counts.unsqueeze(-1) - 1)
            yield Batch(self.stretch(nodes, first, last) or self.gather(rows), weight)

    def everything(self, at_once: int) -> Iterator[Batch]:
        counts, scale = self.counts[self.here], self.scale[self.here]
        # With the size given, a GPU is not asked for it.
        weight = torch.repeat_interleave(scale / (self.nodes * counts), counts, output_size=self.size)
        stored = self.stored if self._ready is None else self._ready
        for first in range(0, self.size, at_once):
            samples, own = tree_map(lambda part, a=first: part[a : a + at_once], (stored, weight))
            ready = map_inputs(self.prepare, samples) if self._ready is None else samples
            yield Batch(ready, own.to(self.dtype))

    def some(self, count: int) -> Batch:
        rows = torch.arange(min(count, self.size), device=self.counts.device)
        return Batch(self.gather(rows), self.scale.new_ones(len(rows)))

    def samples(self, nodes: Tensor) -> int:
        return self.size if len(nodes) == self.nodes else int(self.counts[nodes].sum())

    def test_set(self, samples: Any) -> Any:
        given, own = described(samples), self.given
        if list(given) != list(own):
            raise HoldfastError(f"test: columns are {list(given)}, for training {list(own)}")
        for name in own:
            if given[name] != own[name]:
                raise HoldfastError(f"test {name}: samples are {given[name]}, for training {own[name]}")
        return self._placed(samples, self.counts.device)

    def prepared(self, stored: Any, at_once: int) -> Iterator[Any]:
        for first in range(0, len(next(leaves(stored))), at_once):
            some = slice(first, first + at_once)
            yield map_inputs(self.prepare, tree_map(lambda part, some=some: part[some], stored))

    def in_dtype(self, dtype: torch.dtype) -> ArraySource:
        x, y = self.stored if isinstance(self.stored, Pair) else (self.stored, None)
        data = FederatedData(x, y, self.counts.cpu().numpy(), held=self.here.cpu().numpy())
        names = ("batch_size", "seed", "weights", "mean", "std")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        return ArraySource(data, self.scale.to(dtype), **options)

    def identity(self) -> tuple[list[object], list[Tensor]]:
        columns = [] if isinstance(self.stored, Pair) else list(self.stored)
        return [self.mean, self.std, *columns], [*leaves(self.stored), self.counts, self.scale]

    def gather(self, rows: Tensor) -> Any:
        """The samples at ``rows``, of any shape."""
        # On a CPU, index_select is ten times as fast as indexing by a tensor.
        flat, ready = rows.flatten(), self._ready
        picked = tree_map(lambda part: part.index_select(0, flat), self.stored if ready is None else ready)
        samples = map_inputs(self.prepare, picked) if ready is None else picked
        return tree_map(lambda part: part.view(*rows.shape, *part.shape[1:]), samples)

    def stretch(self, nodes: Tensor, first: int, last: int) -> Any:
        """Samples ``first`` to ``last`` of each of ``nodes`` without copying any; None if not possible."""
        if self._by_node is None or not torch.equal(nodes, torch.arange(self.nodes)):
            return None
        return tree_map(lambda part: part[:, first:last], self._by_node)

    def picks(self, nodes: Tensor, round: Word, step: Word) -> Tensor:
        """Which of its samples each of ``nodes`` [m] takes in a step, [m, B]."""
        assert self.batch_size is not None
        counts, size = self.counts.index_select(0, nodes), self.batch_size
        if isinstance(round, Tensor) or isinstance(step, Tensor) or nodes.is_cuda or step == 0:
            return batch_indices(self.seed, nodes, counts, round, step, size)
        at_once = max(1, min(STEPS_DRAWN_AT_ONCE, PICKS_DRAWN_AT_ONCE // (len(nodes) * size)))
        first = step - (step - 1) % at_once
        if self._drawn is None or self._drawn[:2] != (round, first) or self._drawn[2] is not nodes:
            steps = torch.arange(first, first + at_once)[:, None, None]
            picks = batch_indices(self.seed, nodes, counts, round, steps, size)
            self._drawn = (round, first, nodes, picks)
        return self._drawn[3][step - first]

    @cached_property
    def _ready(self) -> Any:
        """All samples as the model sees them, made once where every gradient reads them all on a CPU.

        Minibatches are better gathered as stored: there are fewer bytes to fetch.
        """
        if self.batch_size is not None or self.counts.is_cuda:
            return None
        numbers = sum(part.numel() for part in leaves(self.stored))
        return map_inputs(self.prepare, self.stored) if numbers * self.dtype.itemsize <= MOST_READY else None

    @cached_property
    def _by_node(self) -> Any:
        """What is ready, [n, N/n, ...], if all nodes are here and have as many samples."""
        equal = len(self.here) == self.nodes and bool((self.counts == self.counts[0]).all())
        if self._ready is None or not equal:
            return None
        return tree_map(lambda part: part.view(self.nodes, -1, *part.shape[1:]), self._ready)

    def _placed(self, samples: Any, device: torch.device) -> Any:
        """``samples`` where the model is; real targets in its type of numbers."""
        there = tree_map(lambda part: part.to(device), samples)
        target = targets_of(there)
        if target is None or not target.is_floating_point() or target.dtype == self.dtype:
            return there
        cast = target.to(self.dtype)
        return tree_map(lambda part: cast if part is target else part, there)
