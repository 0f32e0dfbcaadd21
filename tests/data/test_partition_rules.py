"""What each rule that splits samples among nodes does with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from split_samples import CLASSES, GROUPS, N, X, Y, split

from holdfast.core.errors import HoldfastError
from holdfast.data import (
    IID,
    ClassesPerNode,
    Dirichlet,
    NaturalGroups,
    Partitioner,
    Shards,
    Unequal,
    partition,
)


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
def test_real_targets_have_no_classes(how: Partitioner) -> None:
    with pytest.raises(HoldfastError, match="needs class labels"):
        split(how, y=Y + 0.5)


def test_signs_count_as_classes() -> None:
    y = np.where(Y < 5, -1.0, 1.0)
    data = split(Dirichlet(math.inf), 10, y=y)
    assert [data.node(i)[1].sum().item() for i in range(10)] == [0.0] * 10


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
