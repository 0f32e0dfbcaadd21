"""What is done to minibatches on the device before a gradient is computed, drawn from counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.data.samples import describe
from holdfast.problem.gradients.support import RANDOM, reason

Augment = Callable[[Any, Tensor], Any]
"""(samples [B, ...] of one node, key [4]) -> samples, drawn from the key alone; see ``random_uniform``."""


def augmented(augment: Augment, samples: Any, keys: Tensor, stacked: bool) -> Any:
    """The samples [m, B, ...] of all nodes, each with its own key [4]; ``stacked``: in one call."""
    if stacked:
        return vmap(augment)(samples, keys)
    each = [augment(tree_map(lambda part, i=i: part[i], samples), key) for i, key in enumerate(keys)]
    return tree_map(lambda *parts: torch.stack(parts), *each)


def check_augment(augment: Augment, samples: Any, key: Tensor, stacked: bool) -> Any:
    """``samples`` [B, ...] augmented; refuses a function that does not suit them."""
    twice, keys = tree_map(lambda part: torch.stack([part] * 2), samples), torch.stack([key] * 2)
    try:
        once, again = (augmented(augment, twice, keys, stacked) for _ in range(2))
    except Exception as error:  # the user's own code
        told = reason(error)
        if told == RANDOM:
            told = "it draws random numbers by itself; draw from its key, with hf.random_uniform"
        elif "must only return Tensors" in told:
            told = "it must return samples like those that it is given"
        raise HoldfastError(f"augment fails on a batch of {describe(samples)}: {told}") from error
    if describe(once) != describe(twice):
        raise HoldfastError(f"augment gives {describe(once)}; expected, as before, {describe(twice)}")
    if not all(torch.equal(a, b) for a, b in zip(leaves(once), leaves(again), strict=True)):
        raise HoldfastError(
            "augment gives other numbers for the same key: draw from the key alone, with hf.random_uniform "
            "or hf.random_normal"
        )
    return tree_map(lambda part: part[0], once)
