"""A user's loss is tried before training, where its mistakes can still be told from those of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map

Function = Callable[[Any, Any], Any]


def tried(title: str, function: Function, outputs: Any, targets: Tensor) -> Any:
    """What ``function`` gives for the ``outputs`` of two samples, and two of all ``targets`` [N, ...]."""
    some = targets[_rows(targets)[: len(next(leaves(outputs)))]]
    # Cloned, so that they are no leaves: a loss may change outputs in place.
    at = tree_map(lambda part: part.detach().requires_grad_(part.is_floating_point()).clone(), outputs)
    try:
        with torch.enable_grad():
            value = function(at, some)
            differentiable = isinstance(value, Tensor) and value.requires_grad
            if differentiable:
                value.sum().backward()
    except Exception as error:  # the user's own code
        given = ", ".join(str(tuple(part.shape)) for part in leaves(outputs))
        told = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
        raise HoldfastError(
            f"{title} fails on outputs {given} and targets {tuple(some.shape)} of {some.dtype}: "
            f"{told}{_advice(outputs, targets)}"
        ) from error
    if isinstance(value, Tensor) and not differentiable:
        raise HoldfastError(
            f"{title} has no gradient: leave out what cuts it off from the outputs, such as detach(), "
            "argmax() or a comparison"
        )
    return value


def check_broadcasting(title: str, function: Function, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a mean over all pairs of an output and a target, which [B, 1] and [B] give by mistake.

    A mean over samples is the mean of what single samples give. If this one is not, but is as soon as outputs
    have the shape of the targets, then they were broadcast against each other.
    """
    if outputs.shape[1:] == targets.shape[1:] or outputs[0].numel() != targets[0].numel():
        return
    others = torch.nonzero((targets != targets[0]).view(len(targets), -1).any(1))
    if not len(others):
        return
    pair = targets[[0, int(others[0])]]
    z = torch.linspace(0.25, 0.75, pair.numel(), dtype=outputs.dtype, device=outputs.device)
    z = z.view(2, *outputs.shape[1:])
    try:
        with warnings.catch_warnings():  # torch warns of some broadcasts, also of ours
            warnings.simplefilter("ignore")
            single = torch.stack([function(z[i : i + 1].clone(), pair[i : i + 1]) for i in range(2)]).mean()
            given, alike = function(z.clone(), pair), function(z.clone().view(pair.shape), pair)
    except Exception:  # it wants outputs of the shape that they have
        return
    if torch.isclose(alike, single) and not torch.isclose(given, single):
        raise HoldfastError(
            f"{title}: outputs {tuple(z.shape)} and targets {tuple(pair.shape)} are broadcast, so that every "
            "output is compared with every target; give targets in the shape of the outputs, such as "
            "y[:, None], or squeeze the outputs in the loss"
        )


def _rows(targets: Tensor) -> list[int]:
    """Two samples to try a loss on; one has the largest label, which may be out of range."""
    if targets.is_floating_point():
        return list(range(len(targets)))[:2]
    largest = int(targets.view(len(targets), -1).amax(1).argmax())
    return [largest, 1 if largest == 0 and len(targets) > 1 else 0]


def _advice(outputs: Any, targets: Tensor) -> str:
    """What may be wrong with the targets, as far as shapes and types tell."""
    if not isinstance(outputs, Tensor) or outputs.ndim < 2:
        return ""
    if outputs.shape[1] > 1 and targets.is_floating_point() and targets.ndim == 1:
        return "; class numbers are int64: give y.long()"
    if targets.is_floating_point():
        return ""
    if outputs.ndim > 2 and outputs.shape[1:-1] == targets.shape[1:]:
        return (
            "; losses of torch want classes second, the model has them last: give loss='cross-entropy', "
            "which takes both, or a function that calls yours with outputs.movedim(-1, 1)"
        )
    if outputs.shape[1:] == targets.shape[1:] or outputs.shape[1] == 1:
        return "; real targets are floats: give y.float()"
    if targets.ndim > 1 and targets.shape[-1] == 1:
        return "; class numbers have no dimension of their own: give y.squeeze(-1)"
    if (largest := int(targets.max())) >= outputs.shape[1]:
        return (
            f"; labels go up to {largest}, and the model has {outputs.shape[1]} outputs: count classes from "
            "0, or give it more"
        )
    return ""
