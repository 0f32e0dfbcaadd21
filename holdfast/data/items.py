"""Map-style data sets: anything with a length and items, such as those of torch and Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset

from holdfast.core.errors import HoldfastError


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


def stack_items(where: str, items: Sequence[Any]) -> Any:
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
