"""What holds for all rules that split samples among nodes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from split_samples import CLASSES, GROUPS, N, X, Y, split

from holdfast.core.errors import HoldfastError
from holdfast.data import (
    IID,
    PARTITIONERS,
    ClassesPerNode,
    Dirichlet,
    NaturalGroups,
    Partitioner,
    Shards,
    Unequal,
    partition,
)

EVERY = [
    IID(),
    Dirichlet(0.1),
    Dirichlet(math.inf),
    Shards(per_node=2, size=50),
    ClassesPerNode(1),
    ClassesPerNode(3),
    NaturalGroups(),
    Unequal(1.0),
]


@pytest.mark.parametrize("how", EVERY, ids=repr)
@pytest.mark.parametrize("nodes", [1, 3, 10])
def test_every_sample_at_most_once_and_with_its_own_label(how: Partitioner, nodes: int) -> None:
    data = split(how, nodes)
    rows = data.x[:, 0].long()
    assert len(rows.unique()) == len(rows) == N - data.unused
    assert torch.equal(data.y, torch.from_numpy(Y)[rows])
    assert data.nodes == nodes
    assert data.counts.min() >= 1
    assert data.label_table(CLASSES).sum() == len(rows)


@pytest.mark.parametrize("how", EVERY, ids=repr)
def test_the_seed_decides(how: Partitioner) -> None:
    assert torch.equal(split(how, seed=4).x, split(how, seed=4).x)
    same = torch.equal(split(how, seed=4).x, split(how, seed=5).x)
    assert same == isinstance(how, NaturalGroups)  # owners are given, nothing is drawn


@pytest.mark.parametrize("how", [IID(), Dirichlet(0.5, min_samples=0), Unequal(), ClassesPerNode()], ids=repr)
def test_more_nodes_than_samples(how: Partitioner) -> None:
    with pytest.raises(HoldfastError, match="4 nodes but only 3 samples: use at most 3 nodes"):
        partition(X[:3], Y[:3], how, 4)


def test_tensors_and_arrays_of_any_layout_give_the_same() -> None:
    expected = split(IID())
    read_only = X.copy()
    read_only.setflags(write=False)
    for x in (torch.from_numpy(X), read_only, X.astype(">f8"), X[::-1][::-1]):
        assert torch.equal(partition(x, Y, IID(), 10).x, expected.x)
    for y in (Y.astype(np.uint8), Y.astype(np.uint16), torch.from_numpy(Y).to(torch.int32), Y.tolist()):
        got = partition(X, y, IID(), 10).y
        assert got.dtype == torch.int64
        assert torch.equal(got, expected.y)
    assert partition(X.astype(np.float32), Y * 0.5, IID(), 10).y.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": X[:-1]}, "lengths differ: x has 1199, y has 1200"),
        ({"x": np.where(X == 7, np.nan, X)}, "x: sample 7 has a value that is not finite"),
        ({"y": np.where(Y == 3, np.inf, Y)}, "y: sample .* not finite"),
        ({"y": Y - 1}, "y: class label -1 is negative"),
        (
            {"y": np.stack([Y, Y], axis=1), "how": Dirichlet(0.5)},
            r"one class label per sample, got targets of shape \[2\]",
        ),
        ({"x": np.array(["a"] * N)}, "x: expected numbers"),
        ({"x": X.astype(np.float16)}, "samples are float16; convert"),
        ({"x": [[1.0], [1.0, 2.0]]}, "x: the rows do not all have the same shape"),
        ({"groups": GROUPS[:-1]}, "groups has 1199"),
        ({"groups": GROUPS * 0.5}, "groups: expected one integer per sample"),
        ({"nodes": 0}, "nodes: should be greater than or equal to 1"),
        ({"nodes": 2.5}, "nodes: should be a valid integer"),
        ({"seed": -1}, "seed: should be greater than or equal to 0"),
        ({"how": "iid"}, "how should be a Partition such as"),
    ],
)
def test_mistakes_get_one_line(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": X, "y": Y, "how": IID(), "nodes": 4, "seed": 0, "groups": GROUPS}
    with pytest.raises(HoldfastError, match=message) as caught:
        partition(**{**good, **arguments})
    assert "\n" not in str(caught.value)


def test_a_rule_of_ones_own_is_held_to_the_same() -> None:
    class Fixed(Partitioner):
        def __init__(self, *rows: list[int]) -> None:
            self.rows = rows

        def assign(
            self, labels: np.ndarray, groups: np.ndarray | None, nodes: int, rng: np.random.Generator
        ) -> list[np.ndarray]:
            return [np.array(own, np.int64) for own in self.rows]

    data = partition(X, Y, Fixed([5, 3], [4]), 2)
    assert data.x[:, 0].tolist() == [5, 3, 4]
    assert data.unused == N - 3
    with pytest.raises(HoldfastError, match="gave a sample to two nodes"):
        partition(X, Y, Fixed([5, 3], [3]), 2)
    with pytest.raises(
        HoldfastError, match="gave a sample to two nodes, or not one set of rows to each of 3"
    ):
        partition(X, Y, Fixed([5, 3], [4]), 3)
    with pytest.raises(HoldfastError, match="node 1 has no samples"):
        partition(X, Y, Fixed([5, 3], [], [4]), 3)


def test_partitions_by_name() -> None:
    assert list(PARTITIONERS) == ["classes-per-node", "dirichlet", "groups", "iid", "shards", "unequal"]
    assert PARTITIONERS.build("dirichlet", {"h": math.inf}) == Dirichlet(math.inf)
    assert PARTITIONERS.build("dirichlet", {"h": 1, "min_samples": 3}) == Dirichlet(1.0, 3)
    with pytest.raises(HoldfastError, match="'h' is missing"):
        PARTITIONERS.build("dirichlet", {})
    with pytest.raises(HoldfastError, match="did you mean 'min_samples'"):
        PARTITIONERS.build("dirichlet", {"h": 1, "min_sample": 3})
    for name in PARTITIONERS:
        assert PARTITIONERS.describe(name)["summary"].endswith(".")
