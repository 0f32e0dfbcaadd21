"""Which samples a node takes in a step: drawn with replacement, in epochs, or each by itself (Poisson).

Every draw is a function of (seed, node, round, step) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from scipy.special import bdtrc, pdtrc
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word, batch_indices, shuffled

SamplingName = Literal["replacement", "epochs", "poisson"]

# On a CPU, drawing the minibatches of several steps takes hardly longer than those of one, if they are few.
STEPS_DRAWN_AT_ONCE = 16
PICKS_DRAWN_AT_ONCE = 2**15
Shuffle = Callable[[Tensor, Tensor, int, Word, Word], tuple[Tensor, Tensor]]
"""(nodes [m], counts [m], longest, round, draw) -> words and sample numbers, as ``shuffled`` gives them."""

OVERFLOW = 1e-12  # bounds the probability that a Poisson draw fills all rows, with or without any one sample


class Drawn(NamedTuple):
    """A minibatch of each of m nodes."""

    places: Tensor  # [m, width] int64: sample numbers within the node
    size: int | Tensor  # the divisor of the sum of losses: [m, 1] where nodes differ
    inside: Tensor | None = None  # [m, width] bool: the rows that count; None: all


class Sampling(Protocol):
    """A way to draw minibatches."""

    width: int  # rows in a minibatch
    padded: bool  # whether some of them may not count

    def draw(self, nodes: Tensor, round: Word, step: Word) -> Drawn:
        """The minibatches of ``nodes`` [m] in a step."""


def build_sampling(name: SamplingName, seed: Word, counts: Tensor, batch_size: int | None) -> Sampling | None:
    """The sampling called ``name`` of nodes with ``counts`` [n] samples; None if all are taken in every step.

    "replacement": every sample of a batch is drawn from all, so that one may occur twice. "epochs": a round
    begins with a new random order of the node's samples; each is taken once before any is taken again, and
    the last batch of an epoch is smaller where ``batch_size`` does not divide. "poisson": each sample is
    taken with probability ``batch_size`` / N_i, independently of the others.
    """
    if batch_size is None:
        if name != "replacement":
            raise HoldfastError(f"sampling = {name!r} draws minibatches, but batch_size is 'full': set it")
        return None
    kinds: dict[str, Callable[[Word, Tensor, int], Sampling]]
    kinds = {"replacement": WithReplacement, "epochs": Epochs, "poisson": Poisson}
    return kinds[name](seed, counts, batch_size)


def weights_of(drawn: Drawn, scale: Tensor) -> Tensor:
    """[m, width]: the weights of a minibatch's samples; the mean loss of a node counts ``scale`` [m]."""
    weight = (scale.unsqueeze(-1) / drawn.size).to(scale.dtype).expand(drawn.places.shape)
    return weight if drawn.inside is None else weight * drawn.inside


class WholeBatches:
    """All ``width`` samples of batches that a stream makes."""

    padded = False

    def __init__(self, width: int) -> None:
        self.width = width

    def draw(self, nodes: Tensor, round: Word, step: Word) -> Drawn:
        return Drawn(torch.arange(self.width, device=nodes.device).expand(len(nodes), -1), self.width)


class WithReplacement:
    """Each sample of a batch drawn from all of the node's."""

    padded = False

    def __init__(self, seed: Word, counts: Tensor, batch_size: int) -> None:
        self.seed, self.counts, self.width = seed, counts, batch_size
        self._drawn: tuple[int, int, Tensor, Tensor] | None = None  # round, first step, nodes, their picks

    def draw(self, nodes: Tensor, round: Word, step: Word) -> Drawn:
        return Drawn(self._picks(nodes, round, step), self.width)

    def _picks(self, nodes: Tensor, round: Word, step: Word) -> Tensor:
        counts, size = self.counts.index_select(0, nodes), self.width
        if isinstance(round, Tensor) or isinstance(step, Tensor) or nodes.is_cuda or step == 0:
            return batch_indices(self.seed, nodes, counts, round, step, size)
        at_once = max(1, min(STEPS_DRAWN_AT_ONCE, PICKS_DRAWN_AT_ONCE // (len(nodes) * size)))
        first = step - (step - 1) % at_once
        if self._drawn is None or self._drawn[:2] != (round, first) or self._drawn[2] is not nodes:
            steps = torch.arange(first, first + at_once)[:, None, None]
            picks = batch_indices(self.seed, nodes, counts, round, steps, size)
            self._drawn = (round, first, nodes, picks)
        return self._drawn[3][step - first]


class Epochs:
    """Every sample once before any is taken again, in a new order for every round and epoch of it."""

    def __init__(self, seed: Word, counts: Tensor, batch_size: int) -> None:
        self.seed, self.counts, self.width = seed, counts, batch_size
        self.longest = int(counts.max())
        self.padded = bool((counts % batch_size != 0).any())
        self._kept: tuple[int, Tensor, Tensor, Tensor] | None = None  # round, nodes, epochs, their orders

    def draw(self, nodes: Tensor, round: Word, step: Word) -> Drawn:
        counts = self.counts.index_select(0, nodes).unsqueeze(-1)
        steps = (counts + self.width - 1) // self.width
        first = step % steps * self.width
        place = first + torch.arange(self.width, device=nodes.device)
        order = self._order(nodes, counts.squeeze(-1), round, step // steps)
        places = order.gather(1, torch.minimum(place, counts - 1))
        if not self.padded:
            return Drawn(places, self.width)
        return Drawn(places, (counts - first).clamp(max=self.width), place < counts)

    def _order(self, nodes: Tensor, counts: Tensor, round: Word, epochs: Tensor) -> Tensor:
        if isinstance(round, Tensor) or nodes.is_cuda:
            return shuffled(self.seed, nodes, counts, self.longest, round, epochs)[1]
        kept = self._kept
        if kept is None or kept[0] != round or kept[1] is not nodes or not torch.equal(kept[2], epochs):
            order = shuffled(self.seed, nodes, counts, self.longest, round, epochs)[1]
            self._kept = kept = (round, nodes, epochs, order)
        return kept[3]


class Poisson:
    """Each of a node's N samples with probability q = batch_size / N; the sum of losses is divided by q N.

    That is an unbiased estimate of the mean, whatever the number of samples. Fewer than one draw in 10^12 has
    more samples than there are rows. Of such a draw as many as there are rows are kept, at random, and
    weighted so that the estimate stays unbiased.
    """

    padded = True

    def __init__(self, seed: Word, counts: Tensor, batch_size: int) -> None:
        if (few := torch.nonzero(counts < batch_size)).numel():
            node = int(few[0])
            raise HoldfastError(
                f"sampling = 'poisson': node {node} has {int(counts[node])} samples, fewer than batch_size = "
                f"{batch_size}, the number drawn on average; use at most that many"
            )
        self.counts, self.size = counts, batch_size
        self.shuffle: Shuffle = partial(shuffled, seed)
        self.longest = int(counts.max())
        self.width = min(self.longest, rows_for(batch_size, self.longest))
        self.trims = False  # whether rows that no node needs are left out, which shows in the time taken

    def draw(self, nodes: Tensor, round: Word, step: Word) -> Drawn:
        counts = self.counts.index_select(0, nodes)
        words, order = self.shuffle(nodes, counts, self.longest, round, step)
        taken = words < (self.size * 2**32 // counts).unsqueeze(-1)
        surplus = taken.sum(-1, keepdim=True).clamp(min=self.width).double() / self.width
        width = self.width
        if self.trims and not (isinstance(round, Tensor) or isinstance(step, Tensor) or nodes.is_cuda):
            width = min(width, max(1, int(taken.sum(-1).max())))  # those taken come first
        places = torch.minimum(order[:, :width], counts.unsqueeze(-1) - 1)
        return Drawn(places, self.size / surplus, taken[:, :width])


def drawn_by(shuffle: Shuffle | None, draws: Sampling | None) -> Sampling | None:
    """``draws`` with the random numbers of ``shuffle``; None where nothing is drawn.

    Without a ``shuffle``, draws are as they were, but on a CPU without rows that no node needs.
    """
    if draws is None:
        return None
    assert isinstance(draws, Poisson)
    twin = copy(draws)
    twin.trims = shuffle is None
    if shuffle is not None:
        twin.shuffle = shuffle
    return twin


def rows_for(mean: int, samples: int | None = None) -> int:
    """The smallest number that a Poisson sample of that ``mean`` size reaches less often than ``OVERFLOW``.

    So there is room for any one sample beside all others: what the accounting of privacy rests on.
    It is drawn from at most so many ``samples``; None: from any number, of which a Poisson variable is the
    limit. Of fewer samples, sizes vary less.
    """
    numbers = np.arange(mean, 3 * mean + 100)  # P(size > number), so number + 1 is what is reached
    tail = pdtrc(numbers, mean) if samples is None else bdtrc(numbers, samples, mean / samples)
    return int(numbers[np.argmax(tail < OVERFLOW)]) + 1
