from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from holdfast.data import (
    IID,
    PARTITIONS,
    ClassesPerNode,
    Dirichlet,
    FederatedData,
    NaturalGroups,
    Partition,
    Shards,
    Unequal,
    partition,
)
from holdfast.errors import HoldfastError

N, CLASSES = 1200, 10
X = np.arange(N, dtype=np.float64)[:, None]  # a sample is its own row number
Y = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), N // CLASSES))
GROUPS = np.random.default_rng(1).permutation(np.repeat(np.arange(30) * 7, N // 30))
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


def split(how: Partition, nodes: int = 10, seed: int = 0, y: Any = Y) -> FederatedData:
    return partition(X, y, how, nodes, seed, groups=GROUPS)


# --- what holds for all of them


@pytest.mark.parametrize("how", EVERY, ids=repr)
@pytest.mark.parametrize("nodes", [1, 3, 10])
def test_every_sample_at_most_once_and_with_its_own_label(how: Partition, nodes: int) -> None:
    data = split(how, nodes)
    rows = data.x[:, 0].long()
    assert len(rows.unique()) == len(rows) == N - data.unused
    assert torch.equal(data.y, torch.from_numpy(Y)[rows])
    assert data.nodes == nodes
    assert data.counts.min() >= 1
    assert data.label_table(CLASSES).sum() == len(rows)


@pytest.mark.parametrize("how", EVERY, ids=repr)
def test_the_seed_decides(how: Partition) -> None:
    assert torch.equal(split(how, seed=4).x, split(how, seed=4).x)
    same = torch.equal(split(how, seed=4).x, split(how, seed=5).x)
    assert same == isinstance(how, NaturalGroups)  # owners are given, nothing is drawn


@pytest.mark.parametrize("how", [IID(), Dirichlet(0.5, min_samples=0), Unequal(), ClassesPerNode()], ids=repr)
def test_more_nodes_than_samples(how: Partition) -> None:
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
        ({"y": np.stack([Y, Y], axis=1)}, r"class labels have shape \[1200, 2\]"),
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
    class Fixed(Partition):
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


# --- each of them


@pytest.mark.parametrize("nodes", [7, 10])
def test_iid_sizes_differ_by_one_and_labels_by_chance(nodes: int) -> None:
    data = split(IID(), nodes)
    assert data.unused == 0
    assert np.ptp(data.counts) == (1 if N % nodes else 0)
    # hypergeometric with mean 12 at 10 nodes: standard deviation 3.1; five of them
    assert np.abs(split(IID(), 10).label_table(CLASSES) - 12).max() < 16


def test_infinite_dirichlet_is_exactly_equal_and_leaves_the_remainder_unused() -> None:
    assert (split(Dirichlet(math.inf), 10).label_table(CLASSES) == 12).all()
    data = split(Dirichlet(math.inf), 7)  # 120 = 7 * 17 + 1
    assert (data.label_table(CLASSES) == 17).all()
    assert data.unused == CLASSES


def test_dirichlet_shares_have_the_mean_and_variance_of_the_law() -> None:
    nodes, h = 5, 2.0
    shares = np.stack(
        [split(Dirichlet(h, min_samples=0), nodes, seed).label_table(CLASSES) for seed in range(200)]
    ) / (N // CLASSES)
    # Dirichlet(h 1_n): mean 1/n, variance (n-1)/(n^2 (n h + 1)); 2000 class draws
    assert shares.mean(axis=(0, 2)) == pytest.approx(np.full(nodes, 1 / nodes), abs=0.01)
    assert shares.var(axis=(0, 2)) == pytest.approx(
        np.full(nodes, (nodes - 1) / nodes**2 / (nodes * h + 1)), rel=0.15
    )


def test_smaller_h_means_fewer_classes_per_node() -> None:
    def dominant(h: float) -> float:
        """Mean share of the most frequent class of a node."""
        table = np.concatenate([split(Dirichlet(h), seed=seed).label_table(CLASSES) for seed in range(10)])
        return float((table.max(axis=1) / table.sum(axis=1)).mean())

    assert dominant(0.05) > dominant(0.5) + 0.2
    assert dominant(0.5) > dominant(5.0) + 0.1
    assert dominant(1e6) < 0.12


def test_dirichlet_keeps_the_minimum_even_for_few_samples() -> None:
    y = np.random.default_rng(0).integers(0, 10, 1437)  # as many as the digits
    for seed in range(20):
        data = partition(np.zeros((1437, 1)), y, Dirichlet(0.1), 10, seed)
        assert data.counts.min() >= 10
        assert data.unused == 0


def test_dirichlet_says_what_to_change() -> None:
    with pytest.raises(HoldfastError, match="need more than the 1200 samples: lower min_samples or nodes"):
        split(Dirichlet(1.0, min_samples=121))
    with pytest.raises(
        HoldfastError, match=r"did not come up in \d+ draws with h = 0.001: raise h, or lower"
    ):
        split(Dirichlet(0.001), nodes=15)  # each of the 10 classes goes to one node, almost surely
    with pytest.raises(HoldfastError, match="h = inf gives each only 0"):
        partition(X[:12], Y[:12], Dirichlet(math.inf, min_samples=1), 6)
    for h in (0.0, -1.0, math.nan, "much"):
        with pytest.raises(HoldfastError, match=r"partition 'dirichlet'.h: should be"):
            Dirichlet(h)  # type: ignore[arg-type]


def test_shards_are_single_labels_where_they_divide_the_classes() -> None:
    data = split(Shards(per_node=2, size=60), nodes=8)  # two shards in each class of 120
    assert (data.counts == 120).all()
    assert data.unused == N - 8 * 120
    table = data.label_table(CLASSES)
    assert set(np.unique(table)) <= {0, 60, 120}
    assert (np.count_nonzero(table, axis=1) <= 2).all()


def test_shards_say_which_size_fits() -> None:
    with pytest.raises(HoldfastError, match="make only 6 of size 200: set size to at most 60"):
        split(Shards(), nodes=10)
    assert split(Shards(size=60), nodes=10).unused == 0
    with pytest.raises(HoldfastError, match="use fewer nodes or a smaller per_node"):
        split(Shards(per_node=500), nodes=10)


@pytest.mark.parametrize(("classes", "nodes"), [(1, 10), (2, 10), (3, 7), (10, 4), (1, 25), (4, 33)])
def test_classes_per_node_are_exact_and_evenly_held(classes: int, nodes: int) -> None:
    data = split(ClassesPerNode(classes), nodes)
    table = data.label_table(CLASSES)
    assert (np.count_nonzero(table, axis=1) == classes).all()
    holders = np.count_nonzero(table, axis=0)
    assert np.ptp(holders) <= 1
    for of_class in table.T:
        assert np.ptp(of_class[of_class > 0]) <= 1
    assert data.unused == 0


def test_one_class_per_node_with_ten_nodes_is_a_bijection() -> None:
    table = split(ClassesPerNode(1), 10).label_table(CLASSES)
    assert (table.sum(axis=0) == 120).all()
    assert (table.max(axis=1) == 120).all()
    assert split(ClassesPerNode(1), 4).unused == 6 * 120


def test_classes_per_node_mistakes() -> None:
    with pytest.raises(HoldfastError, match="classes = 11, but the data have only 10 classes"):
        split(ClassesPerNode(11))
    with pytest.raises(HoldfastError, match="class 1 has 1 samples for 2 nodes"):
        partition(X[:9], np.array([0] * 8 + [1]), ClassesPerNode(1), 4)


def test_groups_go_to_nodes_in_order_and_surplus_ones_round_again() -> None:
    one_each = split(NaturalGroups(), 30)
    for i in range(30):
        rows = one_each.node(i)[0][:, 0].long().numpy()
        assert (GROUPS[rows] == 7 * i).all()
        assert len(rows) == 40
    some_twice = split(NaturalGroups(), 25)
    assert some_twice.counts.tolist() == [80] * 5 + [40] * 20
    assert some_twice.unused == 0


def test_groups_mistakes() -> None:
    with pytest.raises(HoldfastError, match="31 nodes but only 30 groups"):
        split(NaturalGroups(), 31)
    with pytest.raises(HoldfastError, match="do not say who owns which sample"):
        partition(X, Y, NaturalGroups(), 10)


def test_unequal_sizes_are_log_normal_and_use_everything() -> None:
    sizes = np.concatenate([split(Unequal(0.5), 10, seed).counts for seed in range(100)])
    assert sizes.sum() == 100 * N
    # log size = sigma N(0, 1) + one number per run; 900 degrees of freedom: standard error 2.4 %
    within = np.log(sizes.reshape(100, 10)).std(axis=1, ddof=1)
    assert np.sqrt((within**2).mean()) == pytest.approx(0.5, rel=0.1)
    assert np.ptp(split(Unequal(0.0), 7).counts) <= 1
    extreme = split(Unequal(1000.0), 10).counts
    assert sorted(extreme)[:9] == [1] * 9
    assert extreme.sum() == N


@pytest.mark.parametrize("how", [Dirichlet(1.0), Shards(size=10), ClassesPerNode()], ids=repr)
def test_real_targets_have_no_classes(how: Partition) -> None:
    with pytest.raises(HoldfastError, match="needs class labels"):
        split(how, y=Y + 0.5)


def test_signs_count_as_classes() -> None:
    y = np.where(Y < 5, -1.0, 1.0)
    data = split(Dirichlet(math.inf), 10, y=y)
    assert [data.node(i)[1].sum().item() for i in range(10)] == [0.0] * 10


# --- FederatedData


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


# --- the registry


def test_partitions_by_name() -> None:
    assert list(PARTITIONS) == ["classes-per-node", "dirichlet", "groups", "iid", "shards", "unequal"]
    assert PARTITIONS.build("dirichlet", {"h": math.inf}) == Dirichlet(math.inf)
    assert PARTITIONS.build("dirichlet", {"h": 1, "min_samples": 3}) == Dirichlet(1.0, 3)
    with pytest.raises(HoldfastError, match="'h' is missing"):
        PARTITIONS.build("dirichlet", {})
    with pytest.raises(HoldfastError, match="did you mean 'min_samples'"):
        PARTITIONS.build("dirichlet", {"h": 1, "min_sample": 3})
    for name in PARTITIONS:
        assert PARTITIONS.describe(name)["summary"].endswith(".")


# --- parts of a data set


def test_iid_may_draw_some_samples_only() -> None:
    data = split(IID(samples=95))
    assert data.counts.tolist() == [10] * 5 + [9] * 5
    assert data.unused == N - 95
    everything = split(IID(), nodes=1).x[:95]  # drawn as if all were dealt out
    assert torch.equal(torch.sort(data.x, dim=0).values, torch.sort(everything, dim=0).values)
    with pytest.raises(HoldfastError, match=r"samples = 1201, but there are only 1200"):
        split(IID(samples=N + 1))


def test_groups_may_leave_later_owners_out() -> None:
    data = split(NaturalGroups(owners=12))
    rows = data.x[:, 0].long().numpy()
    assert set(GROUPS[rows]) == {7 * owner for owner in range(12)}
    assert data.counts.tolist() == [80, 80] + [40] * 8  # the first two nodes have two owners
    assert data.unused == N - 12 * 40
    with pytest.raises(HoldfastError, match=r"owners = 31, but there are only 30 groups"):
        split(NaturalGroups(owners=31))
    with pytest.raises(HoldfastError, match=r"10 nodes but only 9 groups"):
        split(NaturalGroups(owners=9))
