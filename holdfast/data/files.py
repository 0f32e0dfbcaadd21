"""Data sets read from files that the user has. Nothing is downloaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Positive, check
from holdfast.data.arrays import as_owners, as_samples, as_targets
from holdfast.data.cifar import read_batches
from holdfast.data.dataset import DATASETS, Dataset, Finite
from holdfast.data.formats import Arrays, read_idx, read_leaf, read_npz

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
    """Folders the user told us about: the argument first, then the environment."""
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
    """The file or folder a user named: as it stands, or within the data folders."""
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
    """Checked tensors, channels first; complaints name ``path``. No ``classes``: as many as labels say."""
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
