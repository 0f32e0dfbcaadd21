"""Samples that lie with nodes: rows, labels, and data that nodes bring themselves."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data import FederatedData


def test_nodes_are_runs_of_rows() -> None:
    data = FederatedData(torch.arange(6.0)[:, None], torch.tensor([0, 1, 0, 2, 2, 2]), np.array([2, 1, 3]))
    assert data.starts.tolist() == [0, 2, 3]
    assert data.nodes == 3
    x, y = data.node(2)
    assert x[:, 0].tolist() == [3, 4, 5]
    assert y.tolist() == [2, 2, 2]
    assert data.label_table(3).tolist() == [[1, 1, 0], [1, 0, 0], [0, 0, 3]]
    with pytest.raises(HoldfastError, match=r"label 2 of sample 3 is out of range; expected 0\.\.1"):
        data.label_table(2)
    with pytest.raises(HoldfastError, match=r"node 3 does not exist: expected 0\.\.2"):
        data.node(3)
    with pytest.raises(HoldfastError, match="counts: they sum to 5"):
        FederatedData(data.x, data.y, np.array([2, 3]))
    with pytest.raises(HoldfastError, match=r"node 1 has no samples \(1 of 3 nodes are empty\)"):
        FederatedData(data.x, data.y, np.array([2, 0, 4]))
    with pytest.raises(HoldfastError, match="table of labels needs integer class labels"):
        FederatedData(data.x, data.y.double(), np.array([6])).label_table(3)


def test_of_nodes_takes_arrays_tensors_and_torch_datasets() -> None:
    x, y = torch.arange(8, dtype=torch.float32).view(4, 2), torch.tensor([1, 0, 2, 1])

    class Items(torch.utils.data.Dataset[tuple[np.ndarray, int]]):
        """A map-style data set of arrays and plain ints, as many are."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            return x[i].numpy(), int(y[i])

    data = FederatedData.of_nodes([(x, y), (x.numpy()[:1], y.numpy()[:1]), TensorDataset(x, y), Items()])
    assert data.counts.tolist() == [4, 1, 4, 4]
    for i in (0, 2, 3):
        assert torch.equal(data.node(i)[0], x)
        assert torch.equal(data.node(i)[1], y)
    assert torch.equal(data.node(1)[0], x[:1])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((torch.zeros(0, 2), torch.zeros(0)), "node 1 has no samples"),
        (TensorDataset(torch.zeros(0, 2), torch.zeros(0)), "node 1 has no samples"),
        ((torch.zeros(3, 2), torch.zeros(2)), "node 1, x has 3, node 1, y has 2"),
        ((torch.zeros(3, 5), torch.zeros(3)), r"node 1: x is torch.float32 \[5\] per sample, that of node 0"),
        ((torch.zeros(3, 2).double(), torch.zeros(3)), "node 1: x is torch.float64"),
        ((torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)), "node 1: y is torch.int64"),
        (
            (torch.full((3, 2), torch.nan), torch.zeros(3)),
            "node 1, x: sample 0 has a value that is not finite",
        ),
        ((torch.zeros(3, 2), torch.tensor([0, -2, 0])), "node 1, y: class label -2 is negative"),
        (
            torch.zeros(3, 2),
            r"node 1: expected a pair \(x, y\), a dictionary .* or a torch Dataset, got Tensor",
        ),
        (TensorDataset(torch.zeros(3, 2)), r"node 1: item 0 .* expected a pair \(x, y\)"),
        (Stream(), "node 1: an iterable torch Dataset has no length"),
    ],
)
def test_of_nodes_names_the_node(part: Any, message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        FederatedData.of_nodes([(torch.zeros(3, 2), torch.zeros(3)), part])


def test_of_no_nodes() -> None:
    with pytest.raises(HoldfastError, match="there is no node"):
        FederatedData.of_nodes([])


class Augmented(Dataset):
    """Items with a random transform: noise, or a flip of half of them."""

    def __init__(self, transform) -> None:
        self.x = torch.arange(60.0).view(10, 6)
        self.transform, self.generator = transform, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return self.transform(self.x[i], self.generator), i % 2


def noisy(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + torch.randn(x.shape, generator=generator)


def sometimes_flipped(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x.flip(0) if torch.rand((), generator=generator) < 0.5 else x


FROZEN = r"differs on a second read\. Items are read once, .*random transforms are drawn once and frozen"


@pytest.mark.parametrize("transform", [noisy, sometimes_flipped])
def test_a_random_transform_is_not_frozen_without_a_word(transform) -> None:
    with pytest.warns(UserWarning, match=FROZEN) as caught:
        FederatedData.of_nodes([Augmented(transform) for _ in range(4)])
    assert len(caught) == 1  # not one for every node


def test_training_warns_of_random_transforms_in_data_and_test_set() -> None:
    model, plain = torch.nn.Linear(6, 2), Augmented(lambda x, _: x)
    options = {"model": model, "rounds": 1, "metrics": ["train_loss"], "batch_size": 2}
    own_generator = "node 1: items of the Dataset differ .* from a generator of their own"
    with pytest.warns(UserWarning, match=own_generator):  # read when drawn, but nothing can seed them
        hf.train(hf.FedAvg(lr=1e-4), data=[plain, Augmented(noisy)], **options)
    with pytest.warns(UserWarning, match=f"test: item 0 of the Dataset {FROZEN}"):
        hf.train(hf.FedAvg(lr=1e-4), data=[plain, plain], test=Augmented(noisy), **options)


def test_datasets_that_stay_the_same_are_taken_without_a_warning() -> None:
    class Arrays(Augmented):
        def __getitem__(self, i: int):
            return self.x[i].numpy().astype(np.uint8), np.int32(i % 2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FederatedData.of_nodes([Augmented(lambda x, _: x)] * 2)
        FederatedData.of_nodes([Arrays(None)])


def test_items_read_when_drawn_show_themselves_in_one_line() -> None:
    nodes = [TensorDataset(torch.zeros(count, 2), torch.zeros(count)) for count in (20, 30)]
    data = hf.from_datasets(nodes, streaming=True)
    assert repr(data) == "LazyData(50 samples on 2 nodes; items read when they are drawn, as asked for)"
