"""Where batches come from: a source of every node's samples, and the one that holds them all in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.dataset import prepare
from holdfast.data.federated import FederatedData
from holdfast.data.samples import Pair, described, map_inputs, targets_of
from holdfast.problem.sampling import Sampling, SamplingName, Shuffle, build_sampling, drawn_by, weights_of

# --- how samples enter a model: on its device, in its type of numbers, as (x - mean)/std ----------------


class InputTransform:
    """``like``: a tensor with the type and device of the model."""

    def __init__(self, like: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        self.device, self.dtype = like.device, like.dtype
        self.prepare = partial(prepare, mean=mean, std=std, dtype=self.dtype)
        self._copying = torch.cuda.Stream(self.device) if like.is_cuda else None

    def place(self, samples: Tree) -> Tree:
        """Samples as they are stored on the model's device; real targets in its type of numbers."""
        there = tree_map(lambda part: part.to(self.device), samples)
        target = targets_of(there)
        if target is None or not target.is_floating_point() or target.dtype == self.dtype:
            return there
        cast = target.to(self.dtype)
        return tree_map(lambda part: cast if part is target else part, there)

    def enter(self, samples: Tree) -> Tree:
        """Samples read on the host as the model sees them."""
        return map_inputs(self.prepare, self.place(self.send(samples)))

    def send(self, tree: Tree) -> Tree:
        """``tree``, which lies on the host, on the device.

        A GPU copies it while it computes, so that neither it nor the host waits for the other.
        """
        if self._copying is None:
            return tree
        now = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copying):
            there = tree_map(lambda part: part.pin_memory().to(self.device, non_blocking=True), tree)
        now.wait_stream(self._copying)
        for part in leaves(there):
            part.record_stream(now)
        return there

    def in_parts(self, stored: Tree, at_once: int) -> Iterator[Tree]:
        """Stored samples as the model sees them, some at a time."""
        for first in range(0, len(next(leaves(stored))), at_once):
            some = slice(first, first + at_once)
            yield map_inputs(self.prepare, tree_map(lambda part, some=some: part[some], stored))

    @staticmethod
    def check_alike(samples: Tree, expected: dict[str, str]) -> None:
        """Refuses a test set whose samples differ in form from those for training, ``expected``."""
        given = described(samples)
        if list(given) != list(expected):
            raise HoldfastError(f"test: columns are {list(given)}, for training {list(expected)}")
        for name in expected:
            if given[name] != expected[name]:
                raise HoldfastError(
                    f"test {name}: samples are {given[name]}, for training {expected[name]}; make them alike"
                )


# --- where batches come from ----------------------------------------------------------------------------


MOST_READY = 2**30  # bytes of samples that are prepared once, beside those that are stored

Weighting = Literal["uniform", "samples"]


class Batch(NamedTuple):
    """Samples, ready for the model, and their weights in a sum of losses.

    For m nodes at once, all tensors have leading dimensions [m, B]; for one, [B].
    """

    samples: Tree  # only the model and the loss look inside
    weight: Tensor


class Source(Protocol):
    """The samples of the nodes. Weights are such that the sum over a node's samples is its share of f_i."""

    nodes: int
    here: Tensor  # [k]: the nodes whose samples are in this process
    batch_size: int | None  # samples of a node in a step, on average if that varies; None: all
    sampling: SamplingName  # how minibatches are drawn
    draws: Sampling | None  # what draws them; None: all samples are taken in every step
    finite: bool  # whether there is an end of samples, so that they can all be read
    input_transform: InputTransform  # how samples, also of a test set, enter the model
    description: str  # where samples come from, in words; empty: they lie in memory

    @property
    def targets(self) -> Tensor | None:
        """Targets, if samples name them, which the loss checks before training: all, or some if not known."""

    def watch(self, check: Callable[[Tensor], None]) -> None:
        """``check`` is called with the targets [N, ...] of samples whenever they are read."""

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

    def sample_weight(self, nodes: Tensor, of_all_data: bool = False) -> Tensor:
        """[m]: the weight of one sample of ``nodes`` [m] in a Poisson sample, or in a sum over all data."""

    def test_set(self, samples: Tree) -> Tree:
        """``samples`` as stored ones, where the source has its own."""

    def in_dtype(self, dtype: torch.dtype) -> Source:
        """The same samples as numbers of another type."""

    def drawn_by(self, shuffle: Shuffle | None) -> Source:
        """The same samples, of which Poisson samples are drawn as ``sampling.drawn_by`` says."""

    def identity(self) -> tuple[list[object], list[Tensor]] | None:
        """All that the samples and weights depend on, for a hash; None where that is not known."""


def scale_of(counts: Tensor, weights: Weighting, dtype: torch.dtype) -> Tensor:
    """[n]: the weight of each node's mean loss."""
    if weights == "uniform":
        return torch.ones(len(counts), device=counts.device, dtype=dtype)
    return (counts.double() * len(counts) / counts.sum()).to(dtype)


def weight_of_one(counts: Tensor, scale: Tensor, batch_size: int | None) -> Tensor:
    """See ``Source.sample_weight``; ``counts`` and ``scale`` [m] of the nodes."""
    return scale / (counts if batch_size is None else batch_size)


class ArraySource:
    """Samples of all nodes in one tree of tensors, gathered on the model's device.

    ``weights = "uniform"`` weighs all nodes equally (scale 1); ``"samples"`` weighs all samples equally: then
    scale_i = n N_i / N, so that (1/n) sum_i f_i is the mean over all samples, whatever the method.
    ``like``: a tensor with the type and device of the model. ``sampling``: see ``build_sampling``.
    """

    finite = True

    def __init__(
        self,
        data: FederatedData,
        like: Tensor,
        *,
        batch_size: int | None = None,
        sampling: SamplingName = "replacement",
        seed: Word = 0,
        weights: Weighting = "uniform",
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.batch_size, self.seed, self.weights, self.mean, self.std = batch_size, seed, weights, mean, std
        self.nodes = data.nodes
        device, self.dtype = like.device, like.dtype
        self.input_transform = InputTransform(like, mean, std)
        self.given = described(data.samples)  # before targets take the model's number type
        self.stored = self.input_transform.place(data.samples)
        self.size = len(data)
        self.counts = torch.as_tensor(data.counts, device=device)
        self.starts = torch.as_tensor(data.starts, device=device)
        self.here = torch.as_tensor(data.here, device=device)
        self.scale = scale_of(self.counts, weights, self.dtype)
        self.description, self.sampling = data.description, sampling
        self.draws = build_sampling(sampling, seed, self.counts, batch_size)
        self._longest = int(data.counts.max())

    @property
    def targets(self) -> Tensor | None:
        return targets_of(self.stored)

    def watch(self, check: Callable[[Tensor], None]) -> None:
        """Nothing to do: all targets are known and were checked."""

    def batch(self, nodes: Tensor, round: Word, step: Word) -> Batch:
        assert self.draws is not None
        drawn = self.draws.draw(nodes, round, step)
        rows = self.starts.index_select(0, nodes).unsqueeze(-1) + drawn.places
        return Batch(self.gather(rows), weights_of(drawn, self.scale.index_select(0, nodes)))

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
        # With the size given, it is not read from the GPU.
        weight = torch.repeat_interleave(scale / (self.nodes * counts), counts, output_size=self.size)
        stored = self.stored if self._ready is None else self._ready
        for first in range(0, self.size, at_once):
            samples, own = tree_map(lambda part, a=first: part[a : a + at_once], (stored, weight))
            ready = map_inputs(self.input_transform.prepare, samples) if self._ready is None else samples
            yield Batch(ready, own.to(self.dtype))

    def some(self, count: int) -> Batch:
        rows = torch.arange(min(count, self.size), device=self.counts.device)
        return Batch(self.gather(rows), self.scale.new_ones(len(rows)))

    def samples(self, nodes: Tensor) -> int:
        return self.size if len(nodes) == self.nodes else int(self.counts[nodes].sum())

    def sample_weight(self, nodes: Tensor, of_all_data: bool = False) -> Tensor:
        size = None if of_all_data else self.batch_size
        return weight_of_one(self.counts[nodes], self.scale[nodes], size)

    def test_set(self, samples: Tree) -> Tree:
        self.input_transform.check_alike(samples, self.given)
        return self.input_transform.place(samples)

    def in_dtype(self, dtype: torch.dtype) -> ArraySource:
        x, y = self.stored if isinstance(self.stored, Pair) else (self.stored, None)
        counts, held = self.counts.cpu().numpy(), self.here.cpu().numpy()
        data = FederatedData(x, y, counts, held=held, description=self.description)
        names = ("batch_size", "sampling", "seed", "weights", "mean", "std")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        return ArraySource(data, self.scale.to(dtype), **options)

    def holding(self, x: Any, y: Tensor) -> ArraySource:
        """The same nodes and draws with other inputs and targets, which enter the model as they are."""
        twin = copy(self)
        twin.stored, twin.given, twin.mean, twin.std = Pair(x, y), described(Pair(x, y)), 0.0, 1.0
        twin.input_transform = InputTransform(self.scale)
        for made_once in ("_ready", "_by_node"):
            vars(twin).pop(made_once, None)
        return twin

    def drawn_by(self, shuffle: Shuffle | None) -> ArraySource:
        twin = copy(self)
        twin.draws = drawn_by(shuffle, self.draws)
        return twin

    def identity(self) -> tuple[list[object], list[Tensor]]:
        columns = [] if isinstance(self.stored, Pair) else list(self.stored)
        return [self.mean, self.std, *columns], [*leaves(self.stored), self.counts, self.scale]

    def gather(self, rows: Tensor) -> Tree:
        """The samples at ``rows``, of any shape."""
        # On a CPU, index_select is ten times as fast as indexing by a tensor.
        flat, ready = rows.flatten(), self._ready
        picked = tree_map(lambda part: part.index_select(0, flat), self.stored if ready is None else ready)
        samples = map_inputs(self.input_transform.prepare, picked) if ready is None else picked
        return tree_map(lambda part: part.view(*rows.shape, *part.shape[1:]), samples)

    def stretch(self, nodes: Tensor, first: int, last: int) -> Tree:
        """Samples ``first`` to ``last`` of each of ``nodes`` without copying any; None if not possible."""
        if self._by_node is None or not torch.equal(nodes, torch.arange(self.nodes)):
            return None
        return tree_map(lambda part: part[:, first:last], self._by_node)

    @cached_property
    def _ready(self) -> Tree:
        """All samples as the model sees them, made once where every gradient reads them all on a CPU.

        Minibatches are better gathered as stored: there are fewer bytes to fetch.
        """
        if self.batch_size is not None or self.counts.is_cuda:
            return None
        numbers = sum(part.numel() for part in leaves(self.stored))
        return (
            map_inputs(self.input_transform.prepare, self.stored)
            if numbers * self.dtype.itemsize <= MOST_READY
            else None
        )

    @cached_property
    def _by_node(self) -> Tree:
        """What is ready, [n, N/n, ...], if all nodes are here and have as many samples."""
        equal = len(self.here) == self.nodes and bool((self.counts == self.counts[0]).all())
        if self._ready is None or not equal:
            return None
        return tree_map(lambda part: part.view(self.nodes, -1, *part.shape[1:]), self._ready)
