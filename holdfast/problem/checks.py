"""What is checked before training: targets must suit the loss, and batches the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, leaves, tree_map
from holdfast.data.samples import describe, targets_of
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.support import RANDOM, reason
from holdfast.problem.losses import Loss
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import Source

# --- what is checked before training: targets must suit the loss, and batches the model -----------------


def check_loss(row_loss: RowLoss, source: Source, some: Any, test: Any) -> None:
    """Tries the model on ``some`` samples; refuses targets, of ``test`` too, that do not suit the loss.

    Targets that are read later are checked then.
    """
    loss, own = row_loss.loss, source.targets
    outputs = row_loss.probe(some, stacked=False)
    for targets in [own] if test is None else [own, targets_of(test)]:
        # A test set may have fewer samples than the model was tried on.
        few = outputs
        if isinstance(outputs, Tensor) and outputs.ndim > 0 and targets is not None:
            few = outputs[: len(targets)]
        loss.check(few, targets)
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
    if source.draws is None or not source.draws.padded or (loss.per_sample and not model.statistics):
        return
    counts = "BatchNorm" if loss.per_sample else "a loss that gives one number for a batch"
    advice = "" if loss.per_sample else "give one per sample, or "
    raise HoldfastError(
        f"batches have different numbers of samples, so they are padded, and {counts} would count the "
        f"padding: {advice}a batch_size that divides every node's samples, or draw with replacement"
    )


# --- what is done to minibatches on the device before a gradient is computed, drawn from counters -------


Augment = Callable[[Any, Tensor], Any]
"""(samples [B, ...] of one node, key [4]) -> samples, drawn from the key alone; see ``random_uniform``."""


def augmented(augment: Augment, samples: Tree, keys: Tensor, stacked: bool) -> Tree:
    """The samples [m, B, ...] of all nodes, each with its own key [4]; ``stacked``: in one call."""
    if stacked:
        return vmap(augment)(samples, keys)
    each = [augment(tree_map(lambda part, i=i: part[i], samples), key) for i, key in enumerate(keys)]
    return tree_map(lambda *parts: torch.stack(parts), *each)


def check_augment(augment: Augment, samples: Tree, key: Tensor, stacked: bool) -> Tree:
    """``samples`` [B, ...] augmented; refuses a function that does not suit them."""
    twice, keys = tree_map(lambda part: torch.stack([part] * 2), samples), torch.stack([key] * 2)
    try:
        once, again = (augmented(augment, twice, keys, stacked) for _ in range(2))
    except Exception as error:  # the user's own code
        why = reason(error)
        if why == RANDOM:
            why = "it draws random numbers by itself; draw from its key, with hf.random_uniform"
        elif "must only return Tensors" in why:
            why = "it must return samples like those that it is given"
        raise HoldfastError(f"augment fails on a batch of {describe(samples)}: {why}") from error
    if describe(once) != describe(twice):
        raise HoldfastError(f"augment gives {describe(once)}; expected, as before, {describe(twice)}")
    if not all(torch.equal(a, b) for a, b in zip(leaves(once), leaves(again), strict=True)):
        raise HoldfastError(
            "augment gives other numbers for the same key: draw from the key alone, with hf.random_uniform "
            "or hf.random_normal"
        )
    return tree_map(lambda part: part[0], once)
