"""Base-(k+1), one-peer exponential and EquiTopo graphs: exact averages, degrees, and who may run on them."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from conftest import make_quadratics

import holdfast as hf
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.topology import build_network
from holdfast.topology.base_graph import base_weights


def rounds(network: hf.Network) -> list[hf.Network]:
    return [network.at(round) for round in range(network.period)]


def disagreement(network: hf.Network) -> float:
    """‖W_P ... W_2 W_1 - J‖ of one period."""
    product = np.eye(network.nodes)
    for now in rounds(network):
        product = now.weights @ product
    return float(np.abs(product - 1 / network.nodes).max())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_base_graphs_average_exactly_for_every_number_of_nodes(degree):
    rng = np.random.default_rng(0)
    for nodes in range(2, 201):
        period = base_weights(nodes, degree)
        values = rng.standard_normal((nodes, 2))
        mean = values.mean(0)
        for W in period:
            values = W @ values
            assert abs(W - W.T).max() == 0
            assert W.data.min() >= -1e-15
            assert np.diff(W.indptr).max() - 1 <= degree, nodes
        assert np.abs(values - mean).max() < 1e-12, nodes
        assert len(period) <= 2 * np.log(nodes) / np.log(degree + 1) + 2, nodes  # the paper's Theorem 1


def test_the_network_has_these_weights():
    network = hf.base_graph(23, 3)
    assert disagreement(network) < 1e-12
    assert network.period == len(base_weights(23, 3))
    assert max(now.degrees.max() for now in rounds(network)) == 3


@pytest.mark.parametrize(
    ("nodes", "degree", "period"),
    # By hand: 5 = 4 + 1 takes 2 + 1 + 2 rounds; 6 = 2 x 3 takes the 3 of 3 = 2 + 1 and one more; 8 is 2³.
    [(5, 1, 5), (6, 1, 4), (8, 1, 3), (3, 1, 3), (3, 2, 1), (9, 2, 2), (25, 4, 2), (7, 6, 1)],
)
def test_periods_are_those_of_the_construction(nodes, degree, period):
    assert hf.base_graph(nodes, degree).period == period


@pytest.mark.parametrize("n", [5, 25])
def test_a_base_graph_averages_exactly_from_the_start_of_a_period_only(n):
    network = hf.base_graph(n, 1)
    assert network.period is not None
    for first in range(2 * network.period):
        mixed = np.eye(n)
        for now in range(first, first + network.period):
            mixed = network.at(now).weights @ mixed
        assert (np.abs(mixed - 1 / n).max() < 1e-12) == (first % network.period == 0)


def test_no_shorter_prefix_of_a_base_graph_averages_exactly():
    network = hf.base_graph(25, 1)
    product = np.eye(25)
    for now in rounds(network)[:-1]:
        product = now.weights @ product
        assert np.abs(product - 1 / 25).max() > 1e-3


def test_one_peer_exponential_graphs_finish_for_powers_of_two_only():
    for nodes in (2, 4, 8, 64, 128):
        assert disagreement(hf.one_peer_exponential(nodes)) < 1e-12
    for nodes in (6, 25, 100):
        assert disagreement(hf.one_peer_exponential(nodes)) > 1e-3
    assert all(now.degrees.max() == 1 for now in rounds(hf.one_peer_exponential(25)))


def test_equi_dynamic_pairs_agree_over_time():
    network = hf.equi_dynamic(25, seed=3)
    x = np.random.default_rng(0).standard_normal(25)
    mean = x.mean()
    for round in range(120):
        assert network.at(round).degrees.max() == 1
        x = network.at(round).weights @ x
    assert np.abs(x - mean).max() < 1e-6
    assert network.period is None
    assert np.array_equal(network.at(7).dense(), hf.equi_dynamic(25, seed=3).at(7).dense())


def test_equi_static_mixes_at_a_rate_that_does_not_grow_with_the_nodes():
    """Song et al. 2022: E‖W - J‖ is bounded whatever n is; a ring's tends to one."""
    factors = [hf.equi_static(nodes, shifts=8, seed=1).spectral_lambda for nodes in (50, 100, 200)]
    assert max(factors) < 0.75
    assert hf.Network.of(hf.ring(200)).spectral_lambda > 0.999
    assert hf.equi_static(2, shifts=1, seed=0).spectral_lambda == pytest.approx(0)


# --- varying networks ---------------------------------------------------------------------------------------


def test_a_list_of_weights_repeats(quadratics):
    pairs = [np.kron(np.eye(5), np.full((2, 2), 0.5)), hf.Network.of(hf.ring(10)).dense()]
    network = hf.Network.varying(pairs, every=2)
    assert network.period == 4
    for round, which in enumerate([0, 0, 1, 1, 0, 0, 1, 1]):
        assert np.array_equal(network.at(round).dense(), pairs[which])
    assert network.at(0).links().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    models = quadratics.run(hf.Gossip(lr=0.01), 3, network)
    by_hand = quadratics.x0.expand(10, -1)
    for which in (0, 0, 1):
        by_hand = torch.tensor(pairs[which]) @ (by_hand - 0.01 * quadratics.grads(by_hand))
    assert (models[-1] - by_hand).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "varying: the list of graphs is empty"),
        ([hf.ring(4), hf.ring(5)], "varying: graph 1 has 5 nodes, but the first has 4"),
        ([nx.Graph([(0, 1), (2, 3)])] * 2, "varying: all graphs together are not connected"),
        ([np.ones((2, 3)) / 3], r"varying: a matrix of weights must be square, got shape \(2, 3\)"),
        ([np.eye(2) * 0.9 + 0.05, np.eye(2) * 1.5 - 0.5], r"mixing matrix: .* is negative"),
    ],
)
def test_lists_that_make_no_network_are_refused(graphs, message):
    with pytest.raises(hf.HoldfastError, match=message):
        hf.Network.varying(graphs)


def test_names_in_a_file():
    network = build_network("base-graph", {"degree": 2}, None, {}, nodes=10, seed=0)
    assert disagreement(network) < 1e-12
    assert build_network("equi-static", {"shifts": 3}, None, {}, nodes=10, seed=0).sequence is None
    with pytest.raises(
        hf.HoldfastError, match="topology 'base-graph' has its own weights; leave the mixing out"
    ):
        build_network("base-graph", {}, "metropolis", {}, nodes=10, seed=0)
    with pytest.raises(
        hf.HoldfastError, match="graph_every: topology 'equi-dynamic' has nothing to draw anew"
    ):
        build_network("equi-dynamic", {}, None, {}, nodes=10, seed=0, graph_every=2)
    with pytest.raises(hf.HoldfastError, match="degree"):
        hf.base_graph(10, 0)


def test_the_dry_run_counts_a_whole_period():
    network = hf.base_graph(5, 1)
    footprint = dry_run(hf.Gossip(lr=0.1), network)
    simulation = Simulation(hf.Gossip(lr=0.1), make_quadratics(5), network)
    for _ in range(10):
        simulation.step()
    assert simulation.traffic.numbers == pytest.approx(10 * footprint.vectors_per_round * 4)
    assert footprint.vectors_per_link == pytest.approx(1)


# --- who may run where links change -------------------------------------------------------------------------

TRACKING = [
    hf.KGT(lr=0.01, local_steps=4),
    hf.LocalGECL(lr=0.01, local_steps=4),
    hf.DSCAFFOLD(lr=0.01, local_steps=4),
    hf.NETFLEET(lr=0.01, local_steps=2),
    hf.GTSGD(lr=0.02),
    hf.GECL(lr=0.02),
]


@pytest.mark.parametrize("algorithm", TRACKING, ids=str)
def test_tracking_is_exact_where_links_change(quadratics, algorithm):
    """The fixed point x = x*, correction = gradient there, is one of every W."""
    models = quadratics.run(algorithm, 900, hf.base_graph(10, 1))[-1]
    assert (models - quadratics.optimum).abs().max() < 1e-6


def consensus_of_exact_diffusion(network: hf.Network, lazy: bool) -> float:
    """Spectral radius of one period of x'' = W (2x' - x), Exact Diffusion without gradients."""
    nodes = network.nodes
    eye, off = np.eye(nodes), np.eye(nodes) - 1 / nodes
    product = np.eye(2 * nodes)
    for now in rounds(network):
        W = (eye + now.dense()) / 2 if lazy else now.dense()
        product = np.block([[2 * W, -W], [eye, 0 * eye]]) @ product
    return float(np.abs(np.linalg.eigvals(np.kron(np.eye(2), off) @ product)).max())


def test_exact_diffusion_diverges_where_links_change():
    """In pairs 1, 2, 4, ... apart, 2^m nodes: between two mixings a direction goes straight on.

    A direction that is mixed once in m rounds is scaled by -(m - 1) with W itself. With (I + W)/2 some
    direction grows from 32 nodes on.
    """
    for m in (3, 4, 5):
        assert consensus_of_exact_diffusion(hf.one_peer_exponential(2**m), lazy=False) == pytest.approx(m - 1)
    lazy = [consensus_of_exact_diffusion(hf.one_peer_exponential(2**m), lazy=True) for m in (3, 4, 5)]
    assert lazy == pytest.approx([np.sqrt(0.5), np.sqrt(0.5), (3 + np.sqrt(5)) / 4])


@pytest.mark.parametrize("method", [hf.LED(lr=0.01), hf.EXTRA(lr=0.01), hf.ECL(lr=0.01)], ids=str)
def test_methods_that_need_constant_links_say_so(quadratics, method):
    with pytest.raises(hf.HoldfastError, match="needs links and weights that are the same in every round"):
        Simulation(method, quadratics, hf.base_graph(10))
