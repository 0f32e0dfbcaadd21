"""Accuracy, loss and outputs of models on samples, with the statistics that BatchNorm needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.samples import TARGET_NAMES, targets_of
from holdfast.problem.gradients.backend import Backend
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Source
from holdfast.problem.statistics import Buffers, from_moments, moments, pooled

# --- the statistics of BatchNorm in the models of nodes, each on a fixed part of its own data -----------


SAMPLES = 256  # of every node; at least a minibatch


def node_statistics(loss: RowLoss, source: Source, vmapped: bool, rows: Tensor, nodes: Tensor) -> Tensor:
    """Means and variances [m, 2, s] in the model ``rows`` [m, d] of each of ``nodes`` on its own data.

    They are those of the minibatches of the first steps, the same in every round. ``vmapped``: whether the
    model can be run for all rows at once.
    """
    size = source.batch_size
    if size is None:  # one by one: shorter nodes are padded
        first = [next(iter(source.all_of(node[None], SAMPLES))).samples for node in nodes]
        parts = zip(rows, first, strict=True)
        return torch.cat([_measured(loss, vmapped, row[None], samples) for row, samples in parts])
    steps = range(-(-SAMPLES // size))
    found = [_measured(loss, vmapped, rows, source.batch(nodes, 0, step).samples) for step in steps]
    return pooled(torch.stack(found))


def _measured(loss: RowLoss, vmapped: bool, rows: Tensor, samples: Tree) -> Tensor:
    if vmapped:
        found: Tensor = vmap(loss.measured)(rows, samples)
        return found
    own = [tree_map(lambda part, i=i: part[i], samples) for i in range(len(rows))]
    return torch.stack([loss.measured(row, part) for row, part in zip(rows, own, strict=True)])


# --- accuracy, loss and outputs of models ---------------------------------------------------------------


@dataclass(frozen=True)
class SampleTester:
    """Evaluates rows of parameters [m, d] of one model, ``at_once`` samples in a call."""

    row_loss: RowLoss
    source: Source  # of the nodes' own samples, on which statistics are measured
    backend: Backend
    buffers: Buffers
    at_once: int

    def test(self, rows: Tensor, samples: Tree) -> tuple[Tensor, Tensor]:
        rows = self._completed(rows)
        total = torch.zeros(len(rows), 2, dtype=torch.float64, device=rows.device)
        with torch.no_grad():
            for some in self._prepared(rows, samples):
                total += self.backend.tested(rows, some)
        correct, loss = (total / len(next(leaves(samples)))).unbind(-1)
        return correct, loss

    def outputs(self, rows: Tensor, samples: Tree) -> Iterator[tuple[Any, Tensor]]:
        if targets_of(samples) is None:
            raise HoldfastError(
                "metrics of outputs need targets: call a column of the test set one of "
                f"{', '.join(TARGET_NAMES)}"
            )
        rows = self._completed(rows)
        for some in self._prepared(rows, samples):
            with torch.no_grad():
                outputs = self.backend.outputs(rows, some)
            targets = targets_of(some)
            assert targets is not None
            yield outputs, targets

    def correct(self, outputs: Any, targets: Any) -> Tensor:
        return self.row_loss.loss.correct(outputs, targets)

    def complete(
        self, rows: Tensor, nodes: Tensor | None = None, total: Callable[[Tensor], Tensor] = torch.clone
    ) -> Tensor:
        if not self.row_loss.model.statistics:
            return rows
        with torch.no_grad():
            if nodes is not None and self.buffers == "local":
                statistics = self._statistics(rows, nodes)
            else:
                here = self.source.here
                found = self.moments(rows.expand(len(here), -1) if nodes is None else rows, here)
                # One more column counts the nodes.
                sums = total(torch.cat([found.sum(0).flatten(), found.new_full((1,), len(found))]))
                common = from_moments((sums[:-1] / sums[-1]).view(found.shape[1:]))
                statistics = common.expand(len(rows), *common.shape)
        return torch.cat([rows, statistics.flatten(1)], 1)

    def moments(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Means and second moments [m, 2, s] in BatchNorm of the models ``rows`` [m, d] of ``nodes`` [m]."""
        with torch.no_grad():
            return moments(self._statistics(rows, nodes))

    def _statistics(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Means and variances [m, 2, s] in the model ``rows`` [m, d] of each of ``nodes`` on its own data."""
        return node_statistics(self.row_loss, self.source, self.backend.vmapped, rows, nodes)

    def _completed(self, rows: Tensor) -> Tensor:
        """``rows`` with statistics: their own if they have them, otherwise those of a common model."""
        return self.complete(rows) if rows.shape[1] == self.row_loss.model.dim else rows

    def _prepared(self, rows: Tensor, samples: Tree) -> Iterator[Tree]:
        """``samples`` as the model takes them, as many at a time as fit for all ``rows``."""
        return self.source.input_transform.in_parts(samples, max(1, self.at_once // len(rows)))
