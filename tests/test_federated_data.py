"""Samples that lie with nodes: rows, labels, and data that nodes bring themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

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
        (torch.zeros(3, 2), r"node 1: expected a pair \(x, y\) or a torch Dataset, got Tensor"),
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
