"""Readers of file formats: IDX, npz and LEAF's JSON. A damaged file is an error that names it."""

from __future__ import annotations

import gzip
import math
import textwrap
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from holdfast.core.errors import HoldfastError

GROUP_KEYS = ("writer", "group", "groups")


def in_short(error: Exception) -> str:
    """What another library complained about, in part of a line: it may quote whole files."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return textwrap.shorten(text, 120)


class Arrays(NamedTuple):
    """What a file held, still as numpy arrays and in the layout of the file."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    groups: np.ndarray | None = None


def read_idx(first: Path) -> Arrays:
    """The four IDX files, gzipped or not, in the folder of ``first``, one of them."""
    return Arrays(
        x_train=_idx_array(first.parent, "train-images-idx3-ubyte", 3),
        y_train=_idx_array(first.parent, "train-labels-idx1-ubyte", 1),
        x_test=_idx_array(first.parent, "t10k-images-idx3-ubyte", 3),
        y_test=_idx_array(first.parent, "t10k-labels-idx1-ubyte", 1),
    )


def _idx_array(folder: Path, name: str, ndim: int) -> np.ndarray:
    """An array of unsigned bytes: two zero bytes, type 8, ndim, ndim big-endian sizes, then the values."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise HoldfastError(f"{folder}: the file {name} (or {name}.gz) is missing beside the other IDX files")
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    header = 4 + 4 * ndim
    if len(content) < header or content[:4] != bytes((0, 0, 8, ndim)):
        raise HoldfastError(f"{path}: corrupt, or not an IDX file of bytes with {ndim} dimensions")
    shape = [int(size) for size in np.frombuffer(content, ">u4", count=ndim, offset=4)]
    if len(content) - header != math.prod(shape):
        raise HoldfastError(
            f"{path}: corrupt or truncated: {math.prod(shape)} bytes announced, {len(content) - header} found"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_npz(path: Path) -> Arrays:
    """Arrays ``x_train y_train [x_test y_test]``, or ``x y split`` (0 train, 1 test), maybe owner ids."""
    stored = _npz_arrays(path)
    group_keys = [key for key in GROUP_KEYS if key in stored]
    if len(group_keys) > 1:
        raise HoldfastError(
            f"{path}: both {group_keys[0]!r} and {group_keys[1]!r} name owners; keep one of them"
        )
    groups = stored[group_keys[0]] if group_keys else None
    if groups is not None and groups.dtype.kind in "US":  # owners by name
        groups = np.unique(groups, return_inverse=True)[1]
    if {"x_train", "y_train"} <= set(stored):
        x, y = stored["x_train"], stored["y_train"]
        if ("x_test" in stored) != ("y_test" in stored):
            raise HoldfastError(f"{path}: only one of 'x_test' and 'y_test' is there; give both or neither")
        return Arrays(x, y, stored.get("x_test", x[:0]), stored.get("y_test", y[:0]), groups)
    if {"x", "y", "split"} <= set(stored):
        x, y, split = stored["x"], stored["y"], stored["split"]
        owners = {} if groups is None else {group_keys[0]: groups}
        for key, column in {"y": y, "split": split, **owners}.items():
            if column.shape[:1] != x.shape[:1]:
                raise HoldfastError(f"{path}: {key!r} has shape {column.shape}, but 'x' has shape {x.shape}")
        if split.ndim != 1 or not np.isin(split, (0, 1)).all():
            raise HoldfastError(f"{path}: 'split' should hold one 0 (train) or 1 (test) per sample")
        train = split == 0
        return Arrays(x[train], y[train], x[~train], y[~train], None if groups is None else groups[train])
    raise HoldfastError(
        f"{path}: expected the arrays x_train and y_train (and x_test, y_test), or x, y and split; "
        f"found {', '.join(sorted(stored)) or 'none of them'}"
    )


def _npz_arrays(path: Path) -> dict[str, np.ndarray]:
    wanted = {"x_train", "y_train", "x_test", "y_test", "x", "y", "split", *GROUP_KEYS}
    if not zipfile.is_zipfile(path):
        raise HoldfastError(f"{path}: corrupt, or not an npz archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            stored = {key: archive[key] for key in archive.files if key in wanted}
    except Exception as error:  # a damaged archive fails in zipfile, zlib or numpy, each in several ways
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    for key, array in stored.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise HoldfastError(f"{path}: {key!r} is not an array with one row per sample")
    return stored


class _LeafUser(BaseModel):
    x: list[Any]
    y: list[Any]


class _LeafFile(BaseModel):
    users: list[str]
    user_data: dict[str, _LeafUser]


def read_leaf(folder: Path) -> Arrays:
    """LEAF's JSON files ``train/*.json`` and ``test/*.json``; users are the owners of their samples."""
    x_train, y_train, users = _leaf_part(folder / "train")
    x_test, y_test, _ = _leaf_part(folder / "test")
    return Arrays(x_train, y_train, x_test, y_test, groups=np.unique(users, return_inverse=True)[1])


def _leaf_part(folder: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Samples float32, targets, and the user of every sample."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise HoldfastError(f"{folder}: no .json file there; expected LEAF's folders train and test")
    samples: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    users: list[str] = []
    for path in paths:
        content = _leaf_file(path)
        for user in content.users:
            if user not in content.user_data:
                raise HoldfastError(f"{path}: user {user!r} has no entry in 'user_data'")
            owned = content.user_data[user]
            if len(owned.x) != len(owned.y):
                raise HoldfastError(
                    f"{path}: user {user!r} has {len(owned.x)} samples, {len(owned.y)} targets"
                )
            if not owned.y:
                continue
            try:
                x, y = np.asarray(owned.x, np.float32), np.asarray(owned.y)
            except (TypeError, ValueError):
                raise HoldfastError(
                    f"{path}: the samples of user {user!r} are not numbers of one shape; "
                    "text has to be turned into numbers first"
                ) from None
            if samples and x.shape[1:] != samples[0].shape[1:]:
                raise HoldfastError(
                    f"{path}: samples of user {user!r} have shape {list(x.shape[1:])}, "
                    f"earlier ones {list(samples[0].shape[1:])}"
                )
            samples.append(x)
            targets.append(y)
            users += [user] * len(y)
    if not samples:
        raise HoldfastError(f"{folder}: its files hold no samples")
    return np.concatenate(samples), np.concatenate(targets), users


def _leaf_file(path: Path) -> _LeafFile:
    try:
        return _LeafFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "content"
        raise HoldfastError(f"{path}: not in LEAF's JSON format ({field}: {first['msg']})") from None
