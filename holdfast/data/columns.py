"""Samples as named columns in a file of a node's own: what a model of several inputs is trained on."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves
from holdfast.data.formats import in_short
from holdfast.data.samples import as_tree

PARTS = ("train", "test")


@dataclass(frozen=True, eq=False)
class Columns:
    """Dictionaries of tensors [N, ...], to train on and, if there are any, to test on."""

    train: dict[str, Tensor]
    test: dict[str, Tensor] | None = None

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of one sample in every column."""
        return {name: list(column.shape[1:]) for name, column in self.train.items()}


def has_columns(path: Path) -> bool:
    """Whether an npz file holds columns such as ``train/input_ids``, not ``x_train`` and ``y_train``."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.startswith("train/") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False  # reading the file will tell


def read_columns(path: Path) -> Columns:
    """The columns of an npz file whose arrays are called ``train/NAME`` and ``test/NAME``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name, array in arrays.items():
        part, _, column = name.partition("/")
        if part not in PARTS or not column:
            raise HoldfastError(f"{path}: expected arrays train/NAME and test/NAME, got {name!r}")
        parts[part][column] = array
    trees = {part: as_tree(f"{path}, {part}", columns) for part, columns in parts.items() if columns}
    if "test" in trees and list(trees["test"]) != list(trees["train"]):
        raise HoldfastError(
            f"{path}: columns to test on are {list(trees['test'])}, to train on {list(trees['train'])}"
        )
    return Columns(trees["train"], trees.get("test"))


def write_columns(path: Path, columns: Columns) -> None:
    """A file that ``read_columns`` reads."""
    trees = {"train": columns.train, "test": columns.test or {}}
    named = {
        f"{part}/{name}": column.cpu().numpy()
        for part, tree in trees.items()
        for name, column in tree.items()
    }
    np.savez(path, **named)  # type: ignore[arg-type]


def count(columns: dict[str, Tensor]) -> int:
    """Samples in ``columns``."""
    return len(next(leaves(columns)))
