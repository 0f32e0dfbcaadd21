"""The samples of all nodes as they are stored, and batches of them as a model sees them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.core.randomness import Word, batch_indices

MOST_READY = 2**30  # bytes of samples that are prepared once, beside those that are stored
# On a CPU, drawing the minibatches of several steps takes hardly longer than those of one, if they are few.
STEPS_DRAWN_AT_ONCE = 16
PICKS_DRAWN_AT_ONCE = 2**15


class Batch(NamedTuple):
    """Samples, ready for the model, with their weights in a sum of losses; stacked: [m, ...]."""

    x: Tensor
    y: Tensor
    weight: Tensor


class Samples:
    """Inputs ``x`` [N, ...] and targets ``y`` [N, ...], of node i ``counts[i]``, node after node.

    ``whole``: all of a node's samples are read for each of its gradients.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        counts: Tensor,
        seed: Word,
        prepare: Callable[[Tensor], Tensor],
        whole: bool,
    ) -> None:
        self.x, self.y, self.counts = x, y, counts
        self.seed, self.prepare, self.whole = seed, prepare, whole
        self._drawn: tuple[int, int, Tensor, Tensor] | None = None  # round, first step, nodes, their picks

    def batch(self, rows: Tensor, weight: Tensor) -> Batch:
        """The samples at ``rows``, of any shape."""
        # On a CPU, index_select is ten times as fast as indexing by a tensor.
        flat, ready = rows.flatten(), self._ready
        x = self.prepare(self.x.index_select(0, flat)) if ready is None else ready.index_select(0, flat)
        y = self.y.index_select(0, flat)
        x, y = (part.view(*rows.shape, *part.shape[1:]) for part in (x, y))
        return Batch(x=x, y=y, weight=weight)

    def stretch(self, nodes: Tensor, first: int, last: int, weight: Tensor) -> Batch | None:
        """Samples ``first`` to ``last`` of each of ``nodes`` without copying any, where that is possible."""
        if self._by_node is None or not torch.equal(nodes, torch.arange(len(self.counts))):
            return None
        x, y = (part[:, first:last] for part in self._by_node)
        return Batch(x=x, y=y, weight=weight)

    def picks(self, nodes: Tensor, round: Word, step: Word, size: int) -> Tensor:
        """Which of its samples each of ``nodes`` [m] takes in a step, [m, size]."""
        counts = self.counts.index_select(0, nodes)
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
    def _ready(self) -> Tensor | None:
        """All samples as the model sees them, made once where every gradient reads them all on a CPU.

        Minibatches are better gathered as stored: there are fewer bytes to fetch.
        """
        if not self.whole or self.x.is_cuda:
            return None
        number = self.prepare(self.x[:1]).element_size()
        return self.prepare(self.x) if self.x.numel() * number <= MOST_READY else None

    @cached_property
    def _by_node(self) -> tuple[Tensor, Tensor] | None:
        """What is ready and its targets, [n, N/n, ...], if all nodes have as many samples."""
        if self._ready is None or not bool((self.counts == self.counts[0]).all()):
            return None
        x, y = (part.view(len(self.counts), -1, *part.shape[1:]) for part in (self._ready, self.y))
        return x, y
