from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.data import DATASETS, files
from holdfast.data.files import read_batch


def images(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


# --- CIFAR-10


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """What Python 2 wrote: byte strings as BINSTRING, an array as its reconstruction."""
    raw = pixels.tobytes()
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eU\x04dataq\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\n"
        + b"q\x08K\x00\x85U\x01b\x87Rq\t"
        + b"(K\x01K"
        + bytes([len(labels)])
        + b"M\x00\x0c\x86cnumpy\ndtype\nq\nU\x02u1K\x00K\x01\x87Rq\x0b"
        + b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tbU\tfilenamesq\x0c](U\x05a.pngU\x05b.pngeu."
    )


def python3_pickle(protocol: int, as_bytes: bool) -> Any:
    def write(pixels: np.ndarray, labels: list[int]) -> bytes:
        content = {"batch_label": "training batch", "data": pixels, "labels": labels, "filenames": ["a", "ü"]}
        keyed = {key.encode(): value for key, value in content.items()} if as_bytes else content
        return pickle.dumps(keyed, protocol=protocol)

    return write


@pytest.mark.parametrize(
    "write",
    [
        python2_pickle,
        *(python3_pickle(protocol, as_bytes) for protocol in (2, 3, 4) for as_bytes in (True, False)),
    ],
)
def test_cifar_batches_are_read_without_unpickling(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    batches = [images(4, 3072, seed=i) for i in range(6)]
    labels = [[i, 9, 0, i + 2] for i in range(6)]
    for i in range(5):
        (folder / f"data_batch_{i + 1}").write_bytes(write(batches[i], labels[i]))
    (folder / "test_batch").write_bytes(write(batches[5], labels[5]))
    for data_dir in (tmp_path, folder):
        data = files.cifar10(data_dir)
        assert np.array_equal(data.x_train.numpy(), np.concatenate(batches[:5]).reshape(20, 3, 32, 32))
        assert data.y_train.tolist() == [label for batch in labels[:5] for label in batch]
        assert np.array_equal(data.x_test.numpy(), batches[5].reshape(4, 3, 32, 32))
        assert data.y_test.tolist() == labels[5]
    (folder / "data_batch_3").unlink()
    with pytest.raises(HoldfastError, match="data_batch_3: cannot be read"):
        files.cifar10(tmp_path)


def test_cifar_batches_of_full_length(tmp_path: Path) -> None:
    # lists longer than 1000 are pickled in several pieces
    pixels, labels = images(2500, 3072), np.random.default_rng(0).integers(0, 10, 2500).tolist()
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"labels": labels, "data": pixels}, protocol=2))
    x, y = read_batch(path)
    assert np.array_equal(x.reshape(2500, 3072), pixels)
    assert y.tolist() == labels


def test_damaged_and_foreign_batches_are_named(tmp_path: Path) -> None:
    pixels = images(4, 3072)
    good = python2_pickle(pixels, [1, 2, 3, 4])
    two_more = np.concatenate([pixels, pixels[:2]])
    path = tmp_path / "data_batch_1"
    for content in (
        b"",
        b"no pickle at all",
        good[:-1],
        good[:500],
        pickle.dumps({"data": two_more, "labels": [1, 2, 3, 4]}, protocol=2),
        pickle.dumps({"data": pixels, "fine_labels": [1, 2, 3, 4]}, protocol=2),
        pickle.dumps({"data": pixels, "labels": np.array([1, 2, 3, 4])}, protocol=2),
        pickle.dumps({"data": np.asfortranarray(pixels), "labels": [1, 2, 3, 4]}, protocol=2),
        pickle.dumps({"data": pixels, "labels": [1, 2, 3, 4]}, protocol=5),
    ):
        path.write_bytes(content)
        with pytest.raises(HoldfastError) as caught:
            read_batch(path)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_a_malicious_batch_runs_nothing(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": images(1, 3072), "labels": [1], "x": Attack()}, protocol=2))
    read_batch(path)
    assert not (tmp_path / "attacked").exists()


# --- LEAF


def write_leaf(folder: Path, parts: dict[str, list[dict[str, tuple[list[Any], list[Any]]]]]) -> None:
    """``parts`` maps train and test to one dictionary {user: (x, y)} per file."""
    for part, contents in parts.items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        for i, users in enumerate(contents):
            text = json.dumps(
                {
                    "users": list(users),
                    "num_samples": [len(y) for _, y in users.values()],
                    "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
                }
            )
            (folder / part / f"all_data_{i}.json").write_text(text)


def test_leaf_users_own_their_samples(tmp_path: Path) -> None:
    write_leaf(
        tmp_path / "mine",
        {
            "train": [
                {"zoe": ([[0.0, 1.0], [0.5, 0.25]], [2, 0])},
                {"amy": ([[1.0, 1.0]], [1]), "nobody": ([], [])},
            ],
            "test": [{"zoe": ([[0.0, 0.0]], [3])}],
        },
    )
    data = DATASETS.build("leaf", {"folder": "mine"}, data_dir=str(tmp_path), nodes=2, seed=0)
    assert data.x_train.tolist() == [[0.0, 1.0], [0.5, 0.25], [1.0, 1.0]]
    assert data.x_train.dtype == torch.float32
    assert data.y_train.tolist() == [2, 0, 1]
    assert data.classes == 4
    assert data.groups is not None
    assert data.groups.tolist() == [1, 1, 0]
    assert (data.mean, data.std) == (0.0, 1.0)
    assert data.x_test.tolist() == [[0.0, 0.0]]


def test_femnist_from_leaf_becomes_images(tmp_path: Path) -> None:
    flat = [i / 784 for i in range(784)]
    write_leaf(tmp_path / "femnist", {"train": [{"a": ([flat], [61])}], "test": [{"a": ([flat], [5])}]})
    data = files.femnist(tmp_path)
    assert data.input_shape == (1, 28, 28)
    assert data.x_train[0, 0, 3, 4] == np.float32((3 * 28 + 4) / 784)
    assert (data.classes, data.mean, data.std) == (62, 0.5, 0.5)


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"a": ([[0.0, 1.0], [1.0]], [0, 1])}, "user 'a' are not numbers of one shape"),
        ({"a": (["to be or not"], [0])}, "text has to be turned into numbers"),
        ({"a": ([[0.0]], [0, 1])}, "user 'a' has 1 samples, 2 targets"),
        ({"a": ([[0.0]], [0]), "b": ([[0.0, 1.0]], [0])}, r"user 'b' have shape \[2\]"),
        ({}, "hold no samples"),
    ],
)
def test_leaf_mistakes_name_file_and_user(tmp_path: Path, users: Any, message: str) -> None:
    write_leaf(tmp_path, {"train": [users], "test": [{"a": ([[0.0]], [0])}]})
    with pytest.raises(HoldfastError, match=message) as caught:
        files.leaf(str(tmp_path))
    assert str(caught.value).startswith(str(tmp_path / "train"))


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"users": ["a"], "user_data": {}}', '{"users": 3}'])
def test_a_damaged_leaf_file_is_named(tmp_path: Path, content: str) -> None:
    write_leaf(tmp_path, {"train": [{"a": ([[0.0]], [0])}], "test": [{"a": ([[0.0]], [0])}]})
    broken = tmp_path / "train" / "all_data_0.json"
    broken.write_text(content)
    with pytest.raises(HoldfastError) as caught:
        files.leaf(str(tmp_path))
    assert str(caught.value).startswith(str(broken))
    assert "\n" not in str(caught.value)


def test_leaf_without_a_test_folder(tmp_path: Path) -> None:
    write_leaf(tmp_path, {"train": [{"a": ([[0.0]], [0])}]})
    with pytest.raises(HoldfastError, match=r"test: no .json file there"):
        files.leaf(str(tmp_path))
