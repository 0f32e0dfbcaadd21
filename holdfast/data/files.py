"""Data sets that are read from the user's files. Nothing is downloaded."""

from __future__ import annotations

import gzip
import math
import os
import pickletools
import textwrap
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Positive, check
from holdfast.data.dataset import DATASETS, Dataset, Finite
from holdfast.data.samples import as_owners, as_samples, as_targets

# --- readers of file formats: IDX, npz and LEAF's JSON. A damaged file is an error that names it --------


GROUP_KEYS = ("writer", "group", "groups")


def in_short(error: Exception) -> str:
    """Another library's message, cut to part of a line, since it may quote whole files."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return textwrap.shorten(text, 120)


class Arrays(NamedTuple):
    """The content of a file, still as numpy arrays and in the layout of the file."""

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


# --- CIFAR-10: pickles of which only the opcodes are read, as data --------------------------------------


PIXELS = 3 * 32 * 32
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2", "LONG1"}


def read_batches(first: Path) -> Arrays:
    """The five training batches and the test batch in the folder of ``first``, one of them."""
    train = [read_batch(first.parent / f"data_batch_{i}") for i in range(1, 6)]
    x_test, y_test = read_batch(first.parent / "test_batch")
    return Arrays(
        np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), x_test, y_test
    )


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images [N, 3, 32, 32] uint8 and labels [N] int64 of one file, a pickled dict of data and labels."""
    pixels, labels = b"", []
    in_labels = fortran = fortran_pixels = False
    try:
        for opcode, value, _ in pickletools.genops(path.read_bytes()):
            if opcode.name == "PROTO" and value not in range(5):
                raise ValueError(
                    "pickle protocol 5 stores arrays in another way; use 2, as the original does"
                )
            if opcode.name in ("NEWTRUE", "NEWFALSE"):
                fortran = opcode.name == "NEWTRUE"  # numpy's flag, just before the bytes of an array
            elif opcode.name in _INTEGERS and in_labels:
                labels.append(value)
            elif isinstance(value, (str, bytes)) and value != "latin1":  # Python 3 marks bytes with this
                in_labels = value in ("labels", b"labels")
                text = _latin1(value)
                if len(text) > len(pixels):
                    pixels, fortran_pixels = text, fortran
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be read ({in_short(error)})") from None
    except ValueError as error:
        raise HoldfastError(f"{path}: corrupt or not a CIFAR-10 batch ({in_short(error)})") from None
    if not labels or len(pixels) != len(labels) * PIXELS or fortran_pixels:
        raise HoldfastError(
            f"{path}: not a CIFAR-10 batch: {len(labels)} labels, and {len(pixels)} bytes of pixels where "
            f"{PIXELS} per label were expected, row by row"
        )
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _latin1(value: str | bytes) -> bytes:
    """The bytes of a pickled string: Python 3 writes those of an array as Latin-1 text in older protocols."""
    if isinstance(value, bytes):
        return value
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return b""  # some other text, not bytes


# --- data sets read from files that the user has. Nothing is downloaded ---------------------------------


DATA_VARIABLE = "HOLDFAST_DATA"
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
IDX_NAMES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte"
IDX_READERS = {"train-images-idx3-ubyte": read_idx, "train-images-idx3-ubyte.gz": read_idx}

Folder = str | Path | None
Reader = Callable[[Path], Arrays]


@DATASETS.register("mnist")
def mnist(data_dir: Folder = None, mean: Finite = 0.5, std: Positive = 0.5) -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits 28 x 28, 10 classes; from IDX files or mnist.npz."""
    advice = f"put the four IDX files of yann.lecun.com/exdb/mnist ({IDX_NAMES}; gzipped or not) or mnist.npz"
    path, arrays = _load("mnist", data_dir, {"mnist.npz": read_npz, **IDX_READERS}, advice)
    return _dataset(path, arrays, 10, mean, std)


@DATASETS.register("fashion-mnist")
def fashion_mnist(data_dir: Folder = None, mean: Finite = 0.5, std: Positive = 0.5) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes 28 x 28, 10 classes; from IDX files or npz."""
    advice = (
        f"run 'apt install dataset-fashion-mnist', or put the four IDX files ({IDX_NAMES}; gzipped or not) "
        "or fashion_mnist.npz"
    )
    readers = {"fashion_mnist.npz": read_npz, **IDX_READERS}
    path, arrays = _load("fashion-mnist", data_dir, readers, advice, extra=[DEBIAN_FASHION_MNIST])
    return _dataset(path, arrays, 10, mean, std)


@DATASETS.register("cifar10")
def cifar10(data_dir: Folder = None, mean: Finite = 0.5, std: Positive = 0.5) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour photographs 32 x 32, 10 classes; from python batches or npz."""
    readers = {
        "cifar10.npz": read_npz,
        "cifar-10-batches-py/data_batch_1": read_batches,
        "data_batch_1": read_batches,
    }
    advice = "put cifar-10-batches-py (python version, www.cs.toronto.edu/~kriz/cifar.html) or cifar10.npz"
    path, arrays = _load("cifar10", data_dir, readers, advice)
    return _dataset(path, arrays, 10, mean, std)


@DATASETS.register("femnist")
def femnist(data_dir: Folder = None, mean: Finite = 0.5, std: Positive = 0.5) -> Dataset:
    """FEMNIST: digits and letters 28 x 28 of known writers, 62 classes; from LEAF's JSON or femnist.npz."""
    readers: dict[str, Reader] = {
        "femnist.npz": read_npz,
        "femnist_mit.npz": read_npz,
        "train": lambda path: read_leaf(path.parent),
    }
    advice = "put femnist/train and femnist/test with the JSON files of LEAF (leaf.cmu.edu), or femnist.npz,"
    path, arrays = _load("femnist", data_dir, readers, advice)
    if arrays.x_train.shape[1:] == (28 * 28,):  # LEAF writes images as flat lists
        arrays = arrays._replace(
            x_train=arrays.x_train.reshape(-1, 28, 28), x_test=arrays.x_test.reshape(-1, 28, 28)
        )
    return _dataset(path, arrays, 62, mean, std)


@DATASETS.register("npz")
def npz(
    file: str, data_dir: Folder = None, mean: Finite | None = None, std: Positive | None = None
) -> Dataset:
    """Your own arrays: an npz file with x_train, y_train, x_test, y_test and, if samples have owners, writer.

    Images may be [N, H, W], [N, H, W, C] or [N, C, H, W]. Integer y are class labels from 0, float y targets.
    The owner ids may also be called ``group`` or ``groups``; ``x y writer split`` (0 train, 1 test) is fine
    too. Unless given, mean and std are 0.5 and 0.5 for uint8 pixels, 0 and 1 for floats.
    """
    path = given_path("dataset 'npz'", file, data_dir)
    return _dataset(path, read_npz(path), None, mean, std)


@DATASETS.register("leaf")
def leaf(
    folder: str, data_dir: Folder = None, mean: Finite | None = None, std: Positive | None = None
) -> Dataset:
    """A data set in LEAF's JSON format: a folder with train/*.json and test/*.json; users own their samples.

    Samples are numbers, flat lists or images as for ``npz``; mean and std are 0 and 1 unless given.
    """
    path = given_path("dataset 'leaf'", folder, data_dir)
    return _dataset(path, read_leaf(path), None, mean, std)


def _roots(data_dir: Folder) -> list[Path]:
    """Folders that the user names: the argument first, then the environment."""
    check("data_dir", Folder, data_dir)
    return [Path(given).expanduser() for given in (data_dir, os.environ.get(DATA_VARIABLE)) if given]


def _load(
    name: str, data_dir: Folder, readers: Mapping[str, Reader], advice: str, extra: list[Path] | None = None
) -> tuple[Path, Arrays]:
    """The first of the files ``readers`` names that exists: the npz file or the folder, and its content.

    A folder called like the data set goes first, as IDX files have the same names in MNIST and Fashion-MNIST.
    """
    places = [place for root in _roots(data_dir) for place in (root / name, root)] + (extra or [])
    for place in places:
        for file, reader in readers.items():
            path = place / file
            if os.path.exists(path):
                return path if path.suffix == ".npz" else path.parent, reader(path)
    raise HoldfastError(
        f"dataset {name!r} not found: looked in {_listed(places)}; {advice} into a folder and name it with "
        f"--data-dir (in Python: data_dir) or {DATA_VARIABLE}"
    )


def given_path(where: str, given: str, data_dir: Folder) -> Path:
    """The file or folder that the user named: by itself, or within the data folders."""
    check(where, str, given)
    places = [Path(given).expanduser(), *(root / given for root in _roots(data_dir))]
    for place in places:
        if os.path.exists(place):
            return place
    raise HoldfastError(f"{where}: {given!r} not found: looked for {_listed(places)}")


def _listed(places: list[Path]) -> str:
    unique = dict.fromkeys(str(place) for place in places)
    return ", ".join(unique) or f"no folder, as neither --data-dir nor {DATA_VARIABLE} is given"


def _dataset(
    path: Path, arrays: Arrays, classes: int | None, mean: float | None, std: float | None
) -> Dataset:
    """Checked tensors, channels first; errors name ``path``. No ``classes``: as many as the labels have."""
    try:
        x_train = as_samples("x_train", _channels_first(arrays.x_train))
        y_train, y_test = as_targets("y_train", arrays.y_train), as_targets("y_test", arrays.y_test)
        if classes is None and not y_train.is_floating_point() and len(y_train):
            classes = 1 + max(int(labels.max()) for labels in (y_train, y_test) if len(labels))
        default = (0.0, 1.0) if x_train.is_floating_point() else (0.5, 0.5)
        return Dataset(
            x_train=x_train,
            y_train=y_train,
            x_test=as_samples("x_test", _channels_first(arrays.x_test)),
            y_test=y_test,
            classes=classes,
            groups=None if arrays.groups is None else as_owners("groups", arrays.groups),
            mean=default[0] if mean is None else mean,
            std=default[1] if std is None else std,
        )
    except HoldfastError as error:
        raise HoldfastError(f"{path}: {error}") from None


def _channels_first(x: np.ndarray) -> np.ndarray:
    """[N, H, W] and [N, H, W, C] as [N, C, H, W]; C is 1, 3 or 4. Everything else is left as it is."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return x.transpose(0, 3, 1, 2)
    return x
