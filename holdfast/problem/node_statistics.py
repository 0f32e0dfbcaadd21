"""The statistics of BatchNorm in the models of nodes, each on a fixed part of its own data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from holdfast.core.tree import tree_map
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Source
from holdfast.problem.statistics import pooled

SAMPLES = 256  # of every node; at least a minibatch


def node_statistics(loss: RowLoss, source: Source, vmapped: bool, rows: Tensor, nodes: Tensor) -> Tensor:
    """Means and variances [m, 2, s] in the model ``rows`` [m, d] of each of ``nodes`` on its own data.

    They are those of the minibatches of the first steps, whichever the round. ``vmapped``: whether the model
    can be run for all rows at once.
    """
    size = source.batch_size
    if size is None:  # one by one: shorter nodes are padded
        first = [next(iter(source.all_of(node[None], SAMPLES))).samples for node in nodes]
        parts = zip(rows, first, strict=True)
        return torch.cat([_measured(loss, vmapped, row[None], samples) for row, samples in parts])
    steps = range(-(-SAMPLES // size))
    found = [_measured(loss, vmapped, rows, source.batch(nodes, 0, step).samples) for step in steps]
    return pooled(torch.stack(found))


def _measured(loss: RowLoss, vmapped: bool, rows: Tensor, samples: Any) -> Tensor:
    if vmapped:
        found: Tensor = vmap(loss.measured)(rows, samples)
        return found
    own = [tree_map(lambda part, i=i: part[i], samples) for i in range(len(rows))]
    return torch.stack([loss.measured(row, part) for row, part in zip(rows, own, strict=True)])
