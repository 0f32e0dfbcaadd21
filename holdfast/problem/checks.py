"""What is checked before training: targets must suit the loss, and batches the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.data.samples import targets_of
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import Loss
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Source


def check_loss(row_loss: RowLoss, source: Source, some: Any, test: Any) -> None:
    """Tries the model on ``some`` samples; refuses targets, of ``test`` too, that do not suit the loss.

    Targets that are read later are checked then.
    """
    loss, own = row_loss.loss, source.targets
    outputs = row_loss.probe(some, stacked=False)
    for targets in [own] if test is None else [own, targets_of(test)]:
        # A test set may have fewer samples than the model was tried on.
        few = isinstance(outputs, Tensor) and outputs.ndim > 0 and targets is not None
        loss.check(outputs[: len(targets)] if few else outputs, targets)  # type: ignore[arg-type]
    classes = loss.classes_of(outputs, own)
    source.watch(lambda read: loss.check_targets(read, classes))


def check_batches(model: FlatModel, loss: Loss, source: Source) -> None:
    """Refuses batches that BatchNorm cannot normalise, and padding that would be counted."""
    if model.statistics and source.batch_size == 1:
        raise HoldfastError("batch_size = 1: BatchNorm needs more samples in a batch; give 2 or more")
    if model.statistics and source.batch_size is None:
        for node in source.here:
            if source.samples(node[None]) == 1:
                raise HoldfastError(
                    f"node {int(node)} has a single sample, and BatchNorm needs more in a batch; leave "
                    "the node out, or use torch.nn.GroupNorm"
                )
    if not source.padded or (loss.per_sample and not model.statistics):
        return
    counts = "BatchNorm" if loss.per_sample else "a loss that gives one number for a batch"
    advice = "" if loss.per_sample else "give one per sample, or "
    raise HoldfastError(
        f"batches have different numbers of samples, so they are padded, and {counts} would count the "
        f"padding: {advice}a batch_size that divides every node's samples, or draw with replacement"
    )
