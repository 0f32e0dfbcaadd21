"""Folders of images: one folder per class, or one per node with its class folders inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import import_named
from holdfast.core.validation import Count, Whole
from holdfast.data.dataset import DATASETS, TrainTest
from holdfast.data.federated import FederatedData
from holdfast.data.files import Folder, given_path
from holdfast.data.lazy import LazyData
from holdfast.data.per_node import from_datasets, with_class_names

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})

Transform = Callable[[Tensor], Any]


class ImageFolder(TorchDataset[tuple[Any, int]]):
    """Items (image, label): a uint8 tensor [channels, height, width], and the number of its class."""

    def __init__(
        self,
        files: Sequence[Path],
        targets: Sequence[int],
        classes: tuple[str, ...],
        size: tuple[int, int] | None,
        mode: str,
        transform: Transform | None,
    ) -> None:
        self.files, self.classes, self.size = list(files), classes, size
        self.mode, self.transform = mode, transform
        self.targets = np.array(targets, dtype=np.int64)
        """[N]: the labels, for partitioners."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: int) -> tuple[Any, int]:
        try:
            from PIL import Image
        except ImportError:
            raise HoldfastError("reading images needs Pillow: pip install pillow") from None
        with Image.open(self.files[item]) as opened:
            image = opened.convert(self.mode)
            if self.size is not None:
                image = image.resize(self.size[::-1])
        pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1).movedim(-1, 0)
        pixels = pixels.contiguous()
        return pixels if self.transform is None else self.transform(pixels), int(self.targets[item])


def image_folder(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    mode: str = "RGB",
    transform: Transform | None = None,
) -> ImageFolder:
    """The images in ``path/class/...``, as a Dataset; classes are numbered in the order of their names.

    ``size``: (height, width) to which all are resized. ``mode``: of Pillow, "RGB" or "L" for grey.
    ``transform``: applied to every image; it may draw from the global generators.
    """
    classes = _folders(Path(path), "class")
    return _images(Path(path), classes, size, mode, transform)


def image_folders(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    mode: str = "RGB",
    transform: Transform | None = None,
    workers: int = 0,
    streaming: bool | None = None,
) -> FederatedData | LazyData:
    """The images in ``path/node/class/...``, a node for each folder, whose names are kept in ``names``.

    Classes are numbered in the order of all names, those that a node lacks included. ``workers`` and
    ``streaming``: see ``from_datasets``; other arguments as for ``image_folder``.
    """
    nodes = _folders(Path(path), "node")
    classes = _classes_of_nodes(Path(path), nodes)
    parts = [_images(Path(path) / node, classes, size, mode, transform) for node in nodes]
    data = from_datasets(parts, workers=workers, streaming=streaming, names=nodes, classes=len(classes))
    return with_class_names(data, classes)


@DATASETS.register("image-folder")
def named_image_folder(
    folder: str,
    test_folder: str | None = None,
    size: list[Count] | None = None,
    mode: str = "RGB",
    transform: str | None = None,
    test_transform: str | None = None,
    data_dir: Folder = None,
) -> TrainTest:
    """Images in FOLDER/class/..., to be divided; ``size`` [height, width]; ``transform`` of module:function.

    The transform is applied to the training images, ``test_transform`` to those in ``test_folder``.
    """
    path, dimensions = given_path("dataset 'image-folder'", folder, data_dir), _dimensions(size)
    classes = _folders(path, "class")
    test = None
    if test_folder is not None:
        test_path = given_path("dataset 'image-folder'", test_folder, data_dir)
        test = _images(test_path, classes, dimensions, mode, _transform(test_transform))
    return TrainTest(_images(path, classes, dimensions, mode, _transform(transform)), test)


@DATASETS.register("image-folders")
def named_image_folders(
    folder: str,
    test_folder: str | None = None,
    size: list[Count] | None = None,
    mode: str = "RGB",
    transform: str | None = None,
    test_transform: str | None = None,
    workers: Whole = 0,
    data_dir: Folder = None,
) -> TrainTest:
    """Images in FOLDER/node/class/..., a node for each folder; other keys as for image-folder.

    ``test_folder`` has a folder for every node, too, on which that node is tested. ``workers``: processes
    that read images.
    """
    path, dimensions = given_path("dataset 'image-folders'", folder, data_dir), _dimensions(size)
    train = image_folders(path, size=dimensions, mode=mode, transform=_transform(transform), workers=workers)
    if test_folder is None:
        return TrainTest(train)
    test_path = given_path("dataset 'image-folders'", test_folder, data_dir)
    assert train.names is not None
    classes = _classes_of_nodes(path, train.names)
    form = (classes, dimensions, mode, _transform(test_transform))
    own = [_images(test_path / node, *form) for node in train.names]
    return TrainTest(train, own)


def _dimensions(size: list[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    if len(size) != 2:
        raise HoldfastError(f"size: expected [height, width], got {size}")
    return size[0], size[1]


def _transform(name: str | None) -> Transform | None:
    found: Transform | None = None if name is None else import_named("transform", name, "my_module:flip")
    return found


def _classes_of_nodes(path: Path, nodes: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted({name for node in nodes for name in _folders(path / node, "class")}))


def _folders(path: Path, kind: str) -> tuple[str, ...]:
    if not path.is_dir():
        raise HoldfastError(f"{str(path)!r} is no folder")
    names = tuple(sorted(inner.name for inner in path.iterdir() if inner.is_dir()))
    if not names:
        raise HoldfastError(f"{str(path)!r} has no folder in it; expected one per {kind}")
    return names


def _images(
    path: Path,
    classes: tuple[str, ...],
    size: tuple[int, int] | None,
    mode: str,
    transform: Transform | None,
) -> ImageFolder:
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((path / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise HoldfastError(f"{str(path)!r} has no image in its class folders ({', '.join(classes)})")
    files, labels = zip(*found, strict=True)
    return ImageFolder(files, labels, classes, size, mode, transform)
