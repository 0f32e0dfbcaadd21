from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.errors import HoldfastError
from holdfast.data import DATASETS, Dataset, files

IDX_NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    monkeypatch.setattr(files, "DEBIAN_FASHION_MNIST", tmp_path / "debian")


def images(rows: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, *shape), dtype=np.uint8)


def small_set(*shape: int) -> dict[str, np.ndarray]:
    """Five training and three test images with labels."""
    return {
        "x_train": images(5, *shape),
        "y_train": np.array([3, 1, 9, 0, 1], np.uint8),
        "x_test": images(3, *shape, seed=1),
        "y_test": np.array([2, 9, 4], np.uint8),
    }


def write_idx(folder: Path, arrays: dict[str, np.ndarray], zipped: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for key, name in IDX_NAMES.items():
        array = arrays[key]
        content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def equals(loaded: Dataset, written: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(getattr(loaded, key).numpy(), written[key]) for key in written)


# --- IDX


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("subfolder", ["", "mnist"])
def test_idx_files_are_read_as_written(tmp_path: Path, zipped: bool, subfolder: str) -> None:
    written = small_set(28, 28)
    write_idx(tmp_path / subfolder, written, zipped)
    data = DATASETS.build("mnist", {}, data_dir=str(tmp_path), nodes=2, seed=0)
    assert data.x_train.shape == (5, 1, 28, 28)
    assert data.x_train.dtype == torch.uint8
    assert data.y_train.dtype == torch.int64
    assert (data.classes, data.mean, data.std) == (10, 0.5, 0.5)
    assert equals(
        data, {**written, "x_train": written["x_train"][:, None], "x_test": written["x_test"][:, None]}
    )


def test_the_debian_folder_the_environment_and_the_argument_are_searched_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {}
    for seed, place in enumerate(("debian", "environment", "argument")):
        sets[place] = {**small_set(4, 4), "x_train": images(5, 4, 4, seed=10 + seed)}
        write_idx(tmp_path / place, sets[place], zipped=True)

    def found(data_dir: Path | None) -> str:
        x = files.fashion_mnist(data_dir).x_train[:, 0].numpy()
        return next(place for place, arrays in sets.items() if np.array_equal(x, arrays["x_train"]))

    assert found(None) == "debian"
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "environment"))
    assert found(None) == "environment"
    assert found(tmp_path / "argument") == "argument"
    assert found(tmp_path / "nothing here") == "environment"


def test_a_folder_named_after_the_set_goes_before_bare_files(tmp_path: Path) -> None:
    bare, own = small_set(4, 4), {**small_set(4, 4), "x_train": images(5, 4, 4, seed=7)}
    write_idx(tmp_path, bare, zipped=False)
    write_idx(tmp_path / "fashion-mnist", own, zipped=False)
    assert np.array_equal(files.fashion_mnist(tmp_path).x_train[:, 0].numpy(), own["x_train"])


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("keep", [0, 3, 30, -1])
def test_a_truncated_idx_file_is_named(tmp_path: Path, zipped: bool, keep: int) -> None:
    write_idx(tmp_path, small_set(4, 4), zipped)
    broken = tmp_path / (IDX_NAMES["x_test"] + (".gz" if zipped else ""))
    broken.write_bytes(broken.read_bytes()[:keep])
    with pytest.raises(HoldfastError) as caught:
        files.mnist(tmp_path)
    assert str(caught.value).startswith(str(broken))


def test_a_missing_idx_file_and_a_bad_label_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path, {**small_set(4, 4), "y_test": np.array([0, 10, 1], np.uint8)}, zipped=False)
    with pytest.raises(HoldfastError, match=f"{tmp_path}: y_test: label 10 of sample 1 is out of range"):
        files.mnist(tmp_path)
    (tmp_path / IDX_NAMES["y_train"]).unlink()
    with pytest.raises(HoldfastError, match=f"{IDX_NAMES['y_train']} .* is missing"):
        files.mnist(tmp_path)


# --- sets that are not there


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "femnist"])
def test_a_missing_set_says_where_it_looked_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "env"))
    with pytest.raises(HoldfastError) as caught:
        DATASETS.build(name, {}, data_dir=str(tmp_path / "arg"), nodes=2, seed=0)
    message = str(caught.value)
    for place in ("arg", f"arg/{name}", "env", f"env/{name}"):
        assert str(tmp_path / place) in message
    assert ("apt install dataset-fashion-mnist" in message) == (name == "fashion-mnist")
    assert "--data-dir" in message
    assert "\n" not in message


def test_missing_without_any_folder_given() -> None:
    with pytest.raises(HoldfastError, match="neither --data-dir nor HOLDFAST_DATA is given"):
        files.mnist()


def test_a_file_the_user_names_must_exist(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"'mine.npz' not found: looked for mine.npz, .*mine.npz"):
        files.npz("mine.npz", data_dir=tmp_path)
    with pytest.raises(HoldfastError, match="'folder' is missing"):
        DATASETS.build("leaf", {}, data_dir=None, nodes=2, seed=0)


# --- npz


def test_npz_images_are_turned_channels_first(tmp_path: Path) -> None:
    for stored, expected in [
        ((6, 7), (1, 6, 7)),
        ((6, 7, 3), (3, 6, 7)),
        ((3, 6, 7), (3, 6, 7)),
        ((5,), (5,)),
    ]:
        written = small_set(*stored)
        np.savez(tmp_path / "a.npz", **written)
        data = DATASETS.build("npz", {"file": "a.npz"}, data_dir=str(tmp_path), nodes=2, seed=0)
        assert data.input_shape == expected
        assert (data.classes, data.mean, data.std) == (10, 0.5, 0.5)
    np.savez(tmp_path / "a.npz", **small_set(6, 7, 3))
    data = files.npz(str(tmp_path / "a.npz"))
    assert data.x_train[4, 2, 5, 1] == small_set(6, 7, 3)["x_train"][4, 5, 1, 2]


def test_npz_float_targets_owners_and_no_test_set(tmp_path: Path) -> None:
    x, y = np.linspace(0, 1, 8).reshape(4, 2), np.array([0.5, -1.0, 2.0, 0.0])
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, group=np.array(["eve", "bob", "eve", "ann"]))
    data = files.npz(str(tmp_path / "a.npz"), mean=0.25)
    assert data.classes is None
    assert (data.mean, data.std) == (0.25, 1.0)
    assert data.groups is not None
    assert data.groups.tolist() == [2, 1, 2, 0]
    assert len(data.x_test) == 0
    assert data.x_test.shape[1:] == (2,)


def test_npz_with_a_split_column_and_writers(tmp_path: Path) -> None:
    x, y = images(6, 28, 28), np.array([0, 61, 5, 5, 7, 30], np.uint8)
    writer, split = np.array([4, 4, 9, 9, 2, 2], np.uint16), np.array([0, 1, 0, 0, 1, 0], np.uint8)
    np.savez(
        tmp_path / "femnist_mit.npz", x=x, y=y, writer=writer, split=split, writer_ids=np.array(["a", "b"])
    )
    for data in (files.femnist(tmp_path), files.npz("femnist_mit.npz", data_dir=tmp_path)):
        assert np.array_equal(data.x_train[:, 0].numpy(), x[[0, 2, 3, 5]])
        assert data.y_test.tolist() == [61, 7]
        assert data.classes == 62
        assert data.groups is not None
        assert data.groups.tolist() == [4, 9, 9, 2]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "expected the arrays x_train and y_train"),
        ({"x_train": np.zeros((3, 1))}, "found x_train"),
        ({"x_train": np.zeros((3, 1)), "y_train": np.zeros(2)}, "x_train has 3, y_train has 2"),
        (
            {"x_train": np.zeros((3, 1)), "y_train": np.zeros(3), "x_test": np.zeros((1, 1))},
            "both or neither",
        ),
        ({"x_train": np.full((3, 1), np.nan), "y_train": np.zeros(3)}, "x_train: sample 0"),
        ({"x_train": np.zeros((3, 1), np.int32), "y_train": np.zeros(3)}, "samples are int32"),
        ({"x_train": np.zeros((3, 1)), "y_train": np.array([1, -1, 1])}, "label -1 is negative"),
        ({"x_train": np.zeros((3, 1)), "y_train": np.array(["a", "b", "c"])}, "expected numbers"),
        ({"x_train": np.zeros((3, 1)), "y_train": np.array([0, None, 1])}, "cannot be read"),
        ({"x_train": np.zeros((0, 1)), "y_train": np.zeros(0, int)}, "no training sample"),
        ({"x": np.zeros((3, 1)), "y": np.zeros(3), "split": np.array([0, 1, 2])}, "'split' should hold"),
        ({"x": np.zeros((3, 1)), "y": np.zeros(3), "split": np.array([0, 1])}, "'split' has shape"),
        (
            {"x": np.zeros((3, 1)), "y": np.zeros(3), "split": np.zeros(3), "writer": np.zeros(2)},
            "'writer' has",
        ),
        ({"x_train": np.zeros((3, 1)), "y_train": np.zeros(3), "group": np.zeros(2, int)}, "groups has 2"),
        (
            {"x_train": np.zeros(3), "y_train": np.zeros(3), "group": np.zeros(3), "writer": np.zeros(3)},
            "both 'writer' and 'group' name owners",
        ),
        ({"x_train": np.float64(3), "y_train": np.zeros(3)}, "'x_train' is not an array"),
    ],
)
def test_npz_mistakes_name_the_file(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(HoldfastError, match=message) as caught:
        files.npz(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_damaged_npz_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(path, **small_set(28, 28))
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[200:260] = bytes(60)
    for broken in (content[: len(content) // 2], b"", b"no archive", bytes(flipped)):
        path.write_bytes(broken)
        with pytest.raises(HoldfastError) as caught:
            files.mnist(tmp_path)
        assert str(caught.value).startswith(str(path))


def test_cifar_from_npz(tmp_path: Path) -> None:
    written = small_set(32, 32, 3)
    np.savez(tmp_path / "cifar10.npz", **written)
    data = files.cifar10(tmp_path)
    assert np.array_equal(data.x_test.numpy(), written["x_test"].transpose(0, 3, 1, 2))
