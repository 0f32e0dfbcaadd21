"""Samples as trees of tensors [N, ...]: a pair of inputs and targets, or a dictionary of named columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.data.arrays import as_samples, as_targets, same_length

TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""A column of one of these names, the first that there is, is what the loss compares the outputs with."""


class Pair(NamedTuple):
    """Samples as inputs for the model and targets for the loss."""

    x: Any  # a tensor; a dictionary of keyword arguments; a tuple of arguments
    y: Tensor


def as_tree(where: str, part: Any) -> Any:
    """A node's samples, checked: ``Pair`` of a pair (x, y), a dictionary of tensors of a dictionary."""
    if isinstance(part, Mapping):
        if not part:
            raise HoldfastError(f"{where}: the dictionary is empty; expected columns such as 'input_ids'")
        target = target_name(part)
        tree: Any = {
            name: (as_targets if name == target else as_inputs)(f"{where}, {name!r}", column)
            for name, column in part.items()
        }
        same_length(**{f"{where}, {name!r}": next(leaves(column)) for name, column in tree.items()})
        return tree
    if not (isinstance(part, (tuple, list)) and len(part) == 2):
        raise HoldfastError(
            f"{where}: expected a pair (x, y), a dictionary of tensors or a torch Dataset, got "
            f"{type(part).__name__}{_instead(part)}"
        )
    if isinstance(part[1], Mapping) or (isinstance(part[1], tuple | list) and _are_tensors(part[1])):
        raise HoldfastError(
            f"{where}, y: expected one tensor of targets, got {type(part[1]).__name__} of {len(part[1])}; "
            "stack them, as [N, targets], or give a dictionary of all columns, and step="
        )
    tree = Pair(as_inputs(f"{where}, x", part[0]), as_targets(f"{where}, y", part[1]))
    same_length(**{f"{where}, x": next(leaves(tree.x)), f"{where}, y": tree.y})
    return tree


def _instead(part: Any) -> str:
    """What to give instead of what is no samples."""
    if isinstance(part, DataLoader):
        return "; give its dataset, loader.dataset"
    if isinstance(part, Tensor | np.ndarray):
        return '; give (x, y), or for inputs alone {"x": x} and step='
    return f" of {len(part)}; name them in a dictionary" if isinstance(part, tuple | list) else ""


def _are_tensors(values: Any) -> bool:
    return any(isinstance(value, Tensor | np.ndarray) and value.ndim for value in values)


def as_inputs(where: str, values: Any) -> Any:
    """Inputs of a model: one tensor, or several in a dictionary or tuple, all with a row per sample."""
    if isinstance(values, Mapping):
        tree: Any = {name: as_inputs(f"{where}, {name!r}", column) for name, column in values.items()}
    elif isinstance(values, tuple) and all(isinstance(v, Tensor | np.ndarray) and v.ndim for v in values):
        tree = tuple(as_inputs(f"{where}, input {i}", column) for i, column in enumerate(values))
    else:
        return as_samples(where, values)
    columns = list(leaves(tree))
    if not columns:
        raise HoldfastError(f"{where}: there is no input")
    same_length(**{f"{where}, column {i}": column for i, column in enumerate(columns)})
    return tree


def target_name(columns: Mapping[str, Any]) -> str | None:
    """The column of targets, if there is one."""
    return next((name for name in TARGET_NAMES if name in columns), None)


def inputs_of(samples: Any) -> Any:
    """What the model reads of ``samples``."""
    if not isinstance(samples, Mapping):
        return samples.x
    target = target_name(samples)
    return {name: column for name, column in samples.items() if name != target}


def targets_of(samples: Any) -> Tensor | None:
    """What the loss compares the outputs with, if ``samples`` name it."""
    if not isinstance(samples, Mapping):
        pair: Pair = samples
        return pair.y
    target = target_name(samples)
    return None if target is None else samples[target]


def map_inputs(function: Callable[[Tensor], Tensor], samples: Any) -> Any:
    """``samples`` with ``function`` applied to every tensor but the targets."""
    targets = targets_of(samples)

    def mapped(part: Tensor) -> Tensor:
        return part if part is targets else function(part)

    return tree_map(mapped, samples)


def described(samples: Any) -> dict[str, str]:
    """Type and shape of one sample in every column: ``{"x": "torch.float32 [3]", "y": "torch.int64 []"}``."""
    columns = samples if isinstance(samples, Mapping) else samples._asdict()

    def told(column: Any) -> str:
        return ", ".join(f"{part.dtype} {list(part.shape[1:])}" for part in leaves(column))

    return {name: told(column) for name, column in columns.items()}


def describe(samples: Any) -> str:
    """The same in one line: ``x torch.float32 [3], y torch.int64 []``."""
    return ", ".join(f"{name} {kind}" for name, kind in described(samples).items())
