"""Samples as trees of tensors [N, ...]: a pair of inputs and targets, or a dictionary of named columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import Tree, leaves, tree_map

# --- samples and targets of users (numpy or torch), turned into checked tensors -------------------------


SAMPLE_DTYPES = (torch.uint8, torch.bool, torch.int64, torch.float32, torch.float64)
IGNORED = -100  # a target that does not count, as in torch's cross entropy


def as_samples(where: str, values: Any) -> Tensor:
    """``values`` as a tensor [N, ...] of uint8 pixels, int64 tokens, finite floats or a bool mask."""
    samples = _tensor(where, values)
    if samples.dtype not in SAMPLE_DTYPES:
        raise HoldfastError(
            f"{where}: samples are {_name(samples.dtype)}; "
            "convert them to float32, float64, uint8 pixels or int64 tokens"
        )
    _all_finite(where, samples)
    return samples


def as_targets(where: str, values: Any) -> Tensor:
    """``values`` as class labels [N, ...] int64 or finite float targets [N, ...].

    Labels are not negative; ``IGNORED`` marks those that do not count.
    """
    targets = _tensor(where, values)
    if targets.dtype in (torch.float32, torch.float64):
        _all_finite(where, targets)
        return targets
    if targets.is_floating_point() or targets.is_complex():
        raise HoldfastError(
            f"{where}: targets are {_name(targets.dtype)}; convert them to float32 or float64"
        )
    labels = targets.to(torch.int64)
    negative = labels[(labels < 0) & (labels != IGNORED)]
    if negative.numel():
        raise HoldfastError(
            f"{where}: class label {int(negative.min())} is negative; count from 0, or store -1/+1 as floats"
        )
    return labels


def as_owners(where: str, values: Any) -> Tensor:
    """``values`` as integer group ids [N] int64."""
    owners = _tensor(where, values)
    if owners.ndim != 1 or owners.is_floating_point() or owners.is_complex():
        raise HoldfastError(
            f"{where}: expected one integer per sample, got {_name(owners.dtype)} {list(owners.shape)}"
        )
    return owners.to(torch.int64)


def same_length(**columns: Tensor) -> None:
    """Raises unless all named tensors have the same number of rows."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise HoldfastError("lengths differ: " + ", ".join(f"{name} has {n}" for name, n in lengths.items()))


def labels_below(where: str, labels: Tensor, classes: int) -> None:
    """Raises, naming the label, unless all ``labels`` are in 0..classes-1."""
    beyond = torch.nonzero(labels >= classes)
    if len(beyond):
        row = int(beyond[0])
        raise HoldfastError(
            f"{where}: label {int(labels[row])} of sample {row} is out of range; expected 0..{classes - 1}"
        )


def _tensor(where: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        tensor = values.detach()
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise HoldfastError(f"{where}: the rows do not all have the same shape") from None
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            alike = "; give words numbers, the same for all nodes and the test set"
            words = alike if array.dtype.kind in "USO" else ""
            raise HoldfastError(f"{where}: expected numbers, got values of type {array.dtype}{words}")
        # torch takes neither foreign byte order, nor negative strides, nor read-only memory
        native = array.dtype.newbyteorder("=")
        tensor = torch.from_numpy(np.require(array, dtype=native, requirements=["C", "W"]))
    if tensor.ndim == 0:
        raise HoldfastError(f"{where}: expected one row per sample, got a single number")
    return tensor


def _all_finite(where: str, values: Tensor) -> None:
    if not values.is_floating_point() or bool(values.isfinite().all()):
        return
    row = int(torch.nonzero(~values.isfinite())[0, 0])
    raise HoldfastError(f"{where}: sample {row} has a value that is not finite (NaN or infinite)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- samples as trees of tensors [N, ...]: a pair, or named columns -------------------------------------


TARGET_NAMES = ("labels", "label", "targets", "target", "y")
"""The names of the column of targets, in this order; the loss compares the outputs with the first present."""


class Pair(NamedTuple):
    """Samples as inputs for the model and targets for the loss."""

    x: Any  # a tensor; a dictionary of keyword arguments; a tuple of arguments
    y: Tensor


def as_tree(where: str, part: Any) -> Tree:
    """A node's samples, checked: ``Pair`` of a pair (x, y), a dictionary of tensors of a dictionary."""
    if isinstance(part, Mapping):
        if not part:
            raise HoldfastError(f"{where}: the dictionary is empty; expected columns such as 'input_ids'")
        target = target_name(part)
        tree: Tree = {
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
    """What to give instead of ``part``, which is no samples."""
    if isinstance(part, DataLoader):
        return "; give its dataset, loader.dataset"
    if isinstance(part, Tensor | np.ndarray):
        return '; give (x, y), or for inputs alone {"x": x} and step='
    return f" of {len(part)}; name them in a dictionary" if isinstance(part, tuple | list) else ""


def _are_tensors(values: Any) -> bool:
    return any(isinstance(value, Tensor | np.ndarray) and value.ndim for value in values)


def as_inputs(where: str, values: Any) -> Tree:
    """Inputs of a model: one tensor, or several in a dictionary or tuple, all with a row per sample."""
    if isinstance(values, Mapping):
        tree: Tree = {name: as_inputs(f"{where}, {name!r}", column) for name, column in values.items()}
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


def inputs_of(samples: Tree) -> Tree:
    """What the model reads of ``samples``."""
    if not isinstance(samples, Mapping):
        return samples.x
    target = target_name(samples)
    return {name: column for name, column in samples.items() if name != target}


def targets_of(samples: Tree) -> Tensor | None:
    """What the loss compares the outputs with, if ``samples`` name it."""
    if not isinstance(samples, Mapping):
        pair: Pair = samples
        return pair.y
    target = target_name(samples)
    return None if target is None else samples[target]


def map_inputs(function: Callable[[Tensor], Tensor], samples: Tree) -> Tree:
    """``samples`` with ``function`` applied to every tensor but the targets."""
    targets = targets_of(samples)

    def mapped(part: Tensor) -> Tensor:
        return part if part is targets else function(part)

    return tree_map(mapped, samples)


def described(samples: Tree) -> dict[str, str]:
    """Type and shape of one sample in every column: ``{"x": "torch.float32 [3]", "y": "torch.int64 []"}``."""
    columns = samples if isinstance(samples, Mapping) else samples._asdict()

    def form(column: Any) -> str:
        return ", ".join(f"{part.dtype} {list(part.shape[1:])}" for part in leaves(column))

    return {name: form(column) for name, column in columns.items()}


def describe(samples: Tree) -> str:
    """The same in one line: ``x torch.float32 [3], y torch.int64 []``."""
    return ", ".join(f"{name} {kind}" for name, kind in described(samples).items())


# --- map-style data sets: anything with a length and items, such as those of torch ----------------------


def is_dataset(part: Any) -> bool:
    """Whether ``part`` is a data set of items, and not a pair, a dictionary of columns or an array."""
    if isinstance(part, TorchDataset):
        return True
    if isinstance(part, tuple | list | str | Mapping | Tensor | np.ndarray):
        return False
    return hasattr(part, "__getitem__") and hasattr(part, "__len__")


def items_in(where: str, dataset: Any) -> int:
    """How many items there are."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise HoldfastError(
            f"{where}: an iterable torch Dataset has no length; expected a map-style one, or hf.Stream"
        )
    return len(dataset)


def read_items(where: str, dataset: Any, rows: Sequence[int]) -> list[Any]:
    """The items ``rows``, in one call if the data set takes several at once, as torch's loaders do."""
    try:
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(list(rows)))
        return [dataset[row] for row in rows]
    except Exception as error:  # the user's own code
        shown = ", ".join(map(str, rows[:4])) + (", ..." if len(rows) > 4 else "")
        raise HoldfastError(
            f"{where}: reading items {shown} fails: {type(error).__name__}: {error}"
        ) from error


def stack_items(where: str, items: Sequence[Any]) -> Tree:
    """Items (x, y), or dictionaries, as columns: a pair, or a dictionary."""
    if not items:
        return np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64)
    if isinstance(items[0], Mapping):
        return {name: _column(f"{where}, {name!r}", [item[name] for item in items]) for name in items[0]}
    for i, item in enumerate(items):
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            many = f" of {len(item)}" if isinstance(item, tuple | list) else ""
            raise HoldfastError(
                f"{where}: item {i} is {type(item).__name__}{many}; expected a pair (x, y) or a dictionary"
            )
    return tuple(
        _column(f"{where}, {name}", [item[part] for item in items]) for part, name in enumerate("xy")
    )


def _column(where: str, values: list[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return {name: _column(f"{where}, {name!r}", [value[name] for value in values]) for name in values[0]}
    if isinstance(values[0], tuple):
        parts = zip(*values, strict=True)
        return tuple(_column(f"{where}, input {i}", list(part)) for i, part in enumerate(parts))
    try:
        if isinstance(values[0], Tensor):
            return torch.stack(values)
        return np.stack([np.asarray(value) for value in values])
    except (TypeError, ValueError, RuntimeError):
        raise HoldfastError(
            f"{where}: the items are not tensors or arrays of one shape; convert them, or give a collate_fn "
            "that pads them to one length: hf.from_datasets(..., collate_fn=...)"
        ) from None
