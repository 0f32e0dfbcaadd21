"""Tables whose rows name their organisation, folders of images, and partitioners on all kinds of data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import holdfast as hf
from holdfast.data import NodesData, divide, load_data

pandas = pytest.importorskip("pandas")


def patients() -> Any:
    return pandas.DataFrame(
        {
            "age": [40, 51, 62, 33, 70, 25],
            "hospital": ["south", "north", "south", "east", "north", "south"],
            "blood": ["A", "B", "A", "0", "A", "B"],
            "smokes": [True, False, True, False, True, False],
            "ill": [1, 0, 1, 0, 1, 0],
        }
    )


def test_a_frame_whose_rows_name_their_hospital(tmp_path) -> None:
    data = hf.from_frame(patients(), target="ill", node="hospital", one_hot=["blood"])
    assert data.names == ("east", "north", "south")
    assert data.counts.tolist() == [1, 2, 3]
    x, y = data.node(2)
    assert x.tolist() == [[40, 0, 1, 0, 1], [62, 0, 1, 0, 1], [25, 0, 0, 1, 0]]  # age, 0, A, B, smokes
    assert x.dtype == torch.float32
    assert y.tolist() == [1, 1, 0]
    patients().to_csv(tmp_path / "patients.csv", index=False)
    read = hf.from_frame(tmp_path / "patients.csv", target="ill", node="hospital", one_hot=["blood"])
    assert torch.equal(read.x, data.x)
    assert read.names == data.names
    result = hf.train(hf.FedAvg(lr=1e-4), model=nn.Linear(5, 2), data=data, rounds=2)
    assert np.isfinite(result.history["train_loss"]).all()


def test_targets_of_a_frame() -> None:
    frame = patients().drop(columns="hospital")
    words = hf.from_frame(frame.drop(columns="ill"), target="blood")
    assert words.y.tolist() == [1, 2, 1, 0, 1, 2]
    assert words.nodes == 1
    real = hf.from_frame(frame.assign(ill=frame.ill / 2), target="ill", one_hot=["blood"])
    assert real.y.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda f: f, {}, "column 'blood' holds '0', 'A', 'B', .* name it in one_hot, or leave it out"),
        (lambda f: f, {"target": "il"}, "unknown column 'il'.*'ill'"),
        (lambda f: f.assign(age=[1, None, 3, None, 5, 6]), {}, "values are missing: 'age' in 2 rows; fill"),
        (lambda f: f[["ill", "hospital"]], {}, "there is no column of inputs beside 'ill'"),
        (lambda f: f[:0], {}, "the table has no rows"),
        (lambda f: 3, {}, "expected a pandas frame or the path of a CSV file, got int"),
        (lambda f: "nowhere.csv", {}, "cannot read 'nowhere.csv'"),
        (lambda f: f.assign(hospital=[0.5] * 6), {"one_hot": ["blood"]}, "hospital: expected one integer"),
    ],
)
def test_tables_that_cannot_be(change, options, message) -> None:
    with pytest.raises(hf.HoldfastError, match=message) as caught:
        hf.from_frame(change(patients()), **{"target": "ill", "node": "hospital", **options})
    assert "\n" not in str(caught.value)


def animals() -> tuple[Any, Any]:
    """A frame to train on, and one to test on that lacks a word of each column of words."""
    train = pandas.DataFrame(
        {
            "weight": [1.0, 2.0, 3.0, 4.0],
            "sex": ["f", "m", "f", "x"],
            "zoo": ["south", "north", "south", "north"],
            "kind": ["cat", "dog", "emu", "dog"],
        }
    )
    test = pandas.DataFrame(
        {"kind": ["dog", "emu"], "zoo": ["south", "north"], "sex": ["x", "m"], "weight": [5, 6]}
    )
    return train, test


def test_a_frame_is_read_like_another(tmp_path) -> None:
    frame, other = animals()
    data = hf.from_frame(frame, target="kind", node="zoo", one_hot="sex")
    same = hf.from_frame(other, like=data)
    assert data.names == ("north", "south")
    assert same.y.tolist() == [1, 2]
    assert same.x.tolist() == [[5, 0, 0, 1], [6, 0, 1, 0]]  # weight, f, m, x
    torch.manual_seed(0)
    setting: dict[str, Any] = {"model": nn.Linear(4, 3), "data": data, "rounds": 1}
    other.to_csv(tmp_path / "test.csv", index=False)
    expected = hf.train(
        hf.FedAvg(lr=0.1), test=[(same.x[[1]], same.y[[1]]), (same.x[[0]], same.y[[0]])], **setting
    ).history
    for test in (same, other, tmp_path / "test.csv"):
        found = hf.train(hf.FedAvg(lr=0.1), test=test, **setting).history
        assert found["test_accuracy"] == expected["test_accuracy"]
        assert found["average_loss"] == expected["average_loss"]
    common = hf.train(hf.FedAvg(lr=0.1), test=other.drop(columns="zoo"), **setting).history
    assert common["average_loss"] == pytest.approx(expected["average_loss"])


def test_rows_read_like_others_keep_their_order() -> None:
    """Else what a model says of one patient would be taken for what it says of another."""
    frame, _ = animals()
    data = hf.from_frame(frame, target="kind", node="zoo", one_hot="sex")
    new = frame.sample(frac=1, random_state=3).assign(zoo=["south", "north", "north", "south"])
    read = hf.from_frame(new, like=data)
    assert read.x[:, 0].tolist() == new["weight"].tolist() == [4.0, 2.0, 1.0, 3.0]
    assert [data.class_names[i] for i in read.y] == new["kind"].tolist()
    elsewhere = hf.from_frame(new.assign(zoo="abroad"), like=read)  # rows to predict may be of anybody
    assert elsewhere.x.tolist() == read.x.tolist()


def test_a_frame_read_like_another_trains_the_same_nodes() -> None:
    frame, _ = animals()
    data = hf.from_frame(frame, target="kind", node="zoo", one_hot="sex")
    torch.manual_seed(0)
    setting: dict[str, Any] = {"model": nn.Linear(4, 3), "rounds": 2}
    expected = hf.train(hf.FedAvg(lr=0.1), data=data, **setting)
    found = hf.train(hf.FedAvg(lr=0.1), data=hf.from_frame(frame, like=data), **setting)
    assert found.history["train_loss"] == expected.history["train_loss"]
    with pytest.raises(hf.HoldfastError, match="column 'zoo': 'abroad' is not among 'north', 'south'; drop"):
        hf.train(hf.FedAvg(lr=0.1), data=hf.from_frame(frame.assign(zoo="abroad"), like=data), **setting)


def test_a_divided_frame_keeps_its_words() -> None:
    frame, other = (part.drop(columns="zoo") for part in animals())
    whole = hf.from_frame(frame, target="kind", one_hot=["sex"])
    data = hf.partition(whole, None, hf.IID(), nodes=2)
    assert data.counts.tolist() == [2, 2]
    assert hf.from_frame(other, like=data).y.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (
            lambda f: hf.from_frame(f, target="kind", one_hot=["sex"], node="zoo"),
            "words of column 'sex' were numbered apart from those for training; give the frame itself",
        ),
        (
            lambda f: f.assign(kind=["fox", "cat"]),
            "column 'kind': 'fox' is not among 'cat', 'dog', 'emu'; leave",
        ),
        (lambda f: f.assign(kind=[1, 2]), "column 'kind': '1' is not among 'cat'"),
        (lambda f: f.assign(sex=["z", "m"]), "column 'sex': 'z' is not among 'f', 'm', 'x'"),
        (lambda f: f.assign(zoo=["east", "north"]), "column 'zoo': 'east' is not among .*; drop the column"),
        (lambda f: f.assign(zoo="north"), "column 'zoo': 'south' has no row; drop the column 'zoo' to test"),
        (lambda f: f.drop(columns="weight"), "unknown column 'weight'"),
    ],
)
def test_frames_that_do_not_suit_the_training_data(test, message) -> None:
    frame, other = animals()
    data = hf.from_frame(frame, target="kind", node="zoo", one_hot=["sex"])
    with pytest.raises(hf.HoldfastError, match=message):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(4, 3), data=data, test=test(other), rounds=1)


def test_frames_that_say_nothing_of_each_other() -> None:
    frame, _ = animals()
    numbers = hf.from_frame(frame[["weight", "kind"]], target="kind")
    plain = hf.partition(numbers.x, numbers.y, hf.IID(), nodes=2)
    setting: dict[str, Any] = {"model": nn.Linear(1, 3), "data": plain, "rounds": 1}
    with pytest.raises(hf.HoldfastError, match="words of column 'kind' were numbered apart"):
        hf.train(hf.FedAvg(lr=0.1), test=numbers, **setting)
    with pytest.raises(hf.HoldfastError, match="test: a table is read like the training data, and these are"):
        hf.train(hf.FedAvg(lr=0.1), test=frame, **setting)
    with pytest.raises(hf.HoldfastError, match=r"like: expected data that came from hf.from_frame"):
        hf.from_frame(frame, like=plain)
    with pytest.raises(hf.HoldfastError, match="target: name the column of targets, or give like="):
        hf.from_frame(frame)
    turned = hf.from_frame(frame.assign(age=1.0)[["age", "weight", "kind"]], target="kind")
    other = hf.from_frame(frame.assign(age=1.0)[["weight", "age", "kind"]], target="kind")
    with pytest.raises(
        hf.HoldfastError, match=r"test: columns are \['weight', 'age'\], for training \['age'"
    ):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(2, 3), data=turned, test=other, rounds=1)


# --- images --------------------------------------------------------------------------------------------


def paint(path: Path, shade: int, size: tuple[int, int] = (4, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0], 3), shade, dtype=np.uint8)).save(path)


def test_class_folders(tmp_path) -> None:
    for name, shades in (("dog", [200, 210]), ("cat", [10, 20, 30])):
        for shade in shades:
            paint(tmp_path / name / f"{shade}.png", shade)
    (tmp_path / "dog" / "readme.txt").write_text("not an image")
    images = hf.image_folder(tmp_path)
    assert images.classes == ("cat", "dog")
    assert images.targets.tolist() == [0, 0, 0, 1, 1]
    x, y = images[4]
    assert (x.shape, x.dtype, int(x[0, 0, 0]), y) == ((3, 3, 4), torch.uint8, 210, 1)
    small = hf.image_folder(tmp_path, size=(2, 5), mode="L")
    assert small[0][0].shape == (1, 2, 5)
    parts = hf.partition_dataset(images, hf.ClassesPerNode(1), 2, labels=images.targets)
    assert sorted(len(part) for part in parts) == [2, 3]
    assert all(len({label for _, label in part}) == 1 for part in parts)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    result = hf.train(hf.FedAvg(lr=0.1), model=model, data=parts, rounds=5, batch_size=2)
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]


def test_folders_of_nodes_with_classes(tmp_path) -> None:
    for node, name, shade in (("rome", "cat", 10), ("oslo", "dog", 200), ("oslo", "elk", 90)):
        paint(tmp_path / node / name / "one.png", shade)
    data = hf.image_folders(tmp_path)
    assert data.names == ("oslo", "rome")
    assert data.y.tolist() == [1, 2, 0]
    assert data.class_names == ("cat", "dog", "elk")
    lazy = hf.image_folders(tmp_path, transform=lambda image: image + torch.randint(5, ()).byte())
    assert isinstance(lazy, hf.LazyData)
    assert lazy.names == data.names


def test_folders_without_images(tmp_path) -> None:
    with pytest.raises(hf.HoldfastError, match="has no folder in it; expected one per class"):
        hf.image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(hf.HoldfastError, match="has no image in its class folders"):
        hf.image_folder(tmp_path)
    with pytest.raises(hf.HoldfastError, match="is no folder"):
        hf.image_folder(tmp_path / "nowhere")


# --- by name ---------------------------------------------------------------------------------------------


def named(name: str, nodes: int, **given: Any) -> NodesData:
    found = load_data(name, given, nodes=nodes, seed=0, data_dir=None)
    return divide(name, found, None, nodes=nodes, seed=0)


def test_a_csv_file_by_name(tmp_path) -> None:
    """Words are numbered in both files together: the test file lacks blood B."""
    file, test = str(tmp_path / "patients.csv"), str(tmp_path / "test.csv")
    patients().to_csv(file, index=False)
    patients()[2:4].to_csv(test, index=False)
    expected = hf.from_frame(patients(), target="ill", node="hospital", one_hot=["blood"])
    told: Any = {"target": "ill", "one_hot": ["blood"], "test_file": test}
    given = named("csv", 3, file=file, node="hospital", **told)
    assert isinstance(given.train, hf.FederatedData)
    assert torch.equal(given.train.x, expected.x)
    assert torch.equal(given.train.y, expected.y)
    assert (given.train.names, given.classes) == (expected.names, 2)
    assert given.test.x.tolist() == [[62, 0, 1, 0, 1], [33, 1, 0, 0, 0]]
    divided = named("csv", 2, file=file, target="hospital", one_hot=["blood"])
    assert divided.train.counts.tolist() == [3, 3]
    assert (divided.test, divided.classes) == (None, 3)
    with pytest.raises(hf.HoldfastError, match=r"over 3 nodes, but problem\.nodes is 2"):
        named("csv", 2, file=file, node="hospital", **told)
    patients().drop(columns="age").to_csv(test, index=False)
    with pytest.raises(hf.HoldfastError, match="only one of both files has the column 'age'"):
        named("csv", 3, file=file, node="hospital", **told)


def brighter(image: Any) -> Any:
    return image + torch.randint(5, ()).byte()


def test_folders_of_images_by_name(tmp_path) -> None:
    for node, name, shade in (("rome", "cat", 10), ("oslo", "dog", 200), ("oslo", "elk", 90)):
        paint(tmp_path / "train" / node / name / "one.png", shade)
    for node in ("rome", "oslo"):
        paint(tmp_path / "test" / node / "elk" / "one.png", 70)
    told: Any = {"size": [2, 2], "mode": "L", "transform": f"{__name__}:brighter"}
    folders = [str(tmp_path / part) for part in ("train", "test")]
    given = named("image-folders", 2, folder=folders[0], test_folder=folders[1], **told)
    assert isinstance(given.train, hf.LazyData)
    assert (given.train.names, given.train.input_shape, given.classes) == (("oslo", "rome"), (1, 2, 2), 3)
    assert (given.test_counts, given.test.y.tolist()) == ([1, 1], [2, 2])
    whole = named("image-folder", 2, folder=f"{folders[0]}/oslo", test_folder=f"{folders[1]}/oslo", **told)
    assert whole.train.counts.tolist() == [1, 1]
    assert (whole.classes, whole.test.y.tolist(), whole.test.x.unique().tolist()) == (2, [1], [70])
    with pytest.raises(hf.HoldfastError, match=r"size: expected \[height, width\], got \[2\]"):
        named("image-folder", 2, folder=folders[0], size=[2])


# --- partitioners --------------------------------------------------------------------------------------


def test_partitioners_on_trees() -> None:
    words = torch.arange(24).view(12, 2)
    columns = {"input_ids": words, "labels": words + 100}
    data = hf.partition(columns, None, hf.IID(), nodes=3)
    assert data.counts.tolist() == [4, 4, 4]
    assert torch.equal(data.x["labels"], data.x["input_ids"] + 100)
    masks = hf.partition({"image": words.float()}, words, hf.Unequal(0.5), nodes=2)  # [N, 2] whole numbers
    assert torch.equal(masks.x["image"].long(), masks.y)
    classes = hf.partition({"a": words, "label": torch.arange(12) % 3}, None, hf.ClassesPerNode(1), nodes=3)
    assert all(len(classes.node(i)["label"].unique()) == 1 for i in range(3))
    with pytest.raises(
        hf.HoldfastError, match=r"'dirichlet' needs one class label per sample, .* shape \[2\]"
    ):
        hf.partition(columns, None, hf.Dirichlet(0.1), nodes=2)
    with pytest.raises(hf.HoldfastError, match="and was given none: give y, or labels= to"):
        hf.partition_dataset(range(6), hf.Dirichlet(1.0), 2)
    with pytest.raises(hf.HoldfastError, match="'shards' needs one class label per sample"):
        hf.partition({"input_ids": words}, None, hf.Shards(), nodes=2)


def test_groups_are_named_by_words() -> None:
    x, y = torch.arange(6.0)[:, None], torch.zeros(6, dtype=torch.int64)
    hospitals = ["south", "north", "south", "east", "north", "south"]
    data = hf.partition(x, y, hf.NaturalGroups(), nodes=3, groups=hospitals)
    assert data.names == ("east", "north", "south")
    assert data.node(2)[0].flatten().tolist() == [0, 2, 5]
    two = hf.partition(x, y, hf.NaturalGroups(), nodes=2, groups=np.array(hospitals))
    assert two.names == ("east, south", "north")
    assert hf.partition(x, y, hf.IID(), nodes=2, groups=hospitals).names is None
    parts = hf.partition_dataset(
        torch.utils.data.TensorDataset(x, y), hf.NaturalGroups(), 3, groups=hospitals
    )
    assert [part.indices for part in parts] == [[3], [1, 4], [0, 2, 5]]
    with pytest.raises(hf.HoldfastError, match=r"groups: expected a name or a whole number each, got 0\.5"):
        hf.partition(x, y, hf.NaturalGroups(), nodes=2, groups=np.array(["a", 0.5] * 3, dtype=object))
