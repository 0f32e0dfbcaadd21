"""Mixing matrices and their second eigenvalue against closed forms and the published figures."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from sample_graphs import GRAPHS, NODES, built
from scipy.sparse import csr_array

import holdfast.topology as topology
from holdfast.core.errors import HoldfastError
from holdfast.topology import MIXINGS, Network

# --- published figures --------------------------------------------------------------------------------------


COS36, COS72 = math.cos(math.pi / 5), math.cos(2 * math.pi / 5)


@pytest.mark.parametrize(
    ("graph", "mixing", "exact", "published"),
    [
        (topology.ring(10), "metropolis", 1 / 3 + 2 / 3 * COS36, 0.872678),
        (topology.double_ring(10), "metropolis", (1 + 2 * COS36 + 2 * COS72) / 5, 0.647214),
        (topology.complete(10), "metropolis", 0.0, 0.0),
        (topology.complete(10), "uniform", 0.0, 0.0),
        (topology.star(10), "metropolis", 0.9, 0.9),
        (topology.ring(10), "laplacian", 1 - (1 - COS36) / 3, 0.936339),
        (topology.complete(10), "laplacian", 1 / 3, 0.333333),
        (topology.ring(10), "uniform-neighbour", 1 / 3 + 2 / 3 * COS36, 0.872678),
    ],
)
def test_lambda_of_known_networks(graph: nx.Graph, mixing: str, exact: float, published: float) -> None:
    network = Network.of(graph, mixing)
    assert network.spectral_lambda == pytest.approx(exact, abs=1e-14)
    assert network.spectral_lambda == pytest.approx(published, abs=5e-7)


@pytest.mark.parametrize(
    ("graph", "published"),
    [
        (topology.ring(10), 0.238433),
        (topology.double_ring(10), 0.581115),
        (topology.complete(10), 1.0),
        (topology.star(10), 0.19),
    ],
)
def test_mixing_parameter_of_known_networks(graph: nx.Graph, published: float) -> None:
    assert Network.of(graph).mixing_parameter == pytest.approx(published, abs=5e-7)


@pytest.mark.parametrize(
    ("nodes", "p", "published"),
    [
        (50, 0.1, 0.961),
        (50, 0.3, 0.822),
        (50, 0.5, 0.706),
        (50, 0.9, 0.486),
        (10, 0.5, 0.859),
        (30, 0.5, 0.757),
        (70, 0.5, 0.668),
    ],
)
def test_mean_lambda_of_erdos_renyi(nodes: int, p: float, published: float) -> None:
    draws = [
        Network.of(topology.erdos_renyi(nodes, p, seed), "laplacian").spectral_lambda for seed in range(30)
    ]
    # both numbers are means of 30 draws, so their difference has a variance of 2/30 of one draw's
    assert np.mean(draws) == pytest.approx(published, abs=4 * np.std(draws) * math.sqrt(2 / 30))


def test_mean_lambda_and_degree_of_random_geometric() -> None:
    networks = [Network.of(topology.random_geometric(10, 0.4, seed)) for seed in range(100)]
    draws = [network.spectral_lambda for network in networks]
    assert np.mean(draws) == pytest.approx(0.911, abs=4 * np.std(draws) / math.sqrt(100))
    # of 100 draws, 90 should lie between the published quantiles; 9 fewer is three standard deviations
    assert sum(0.83 <= draw <= 0.96 for draw in draws) >= 81
    degrees = [network.degrees.mean() for network in networks]
    assert np.mean(degrees) == pytest.approx(3.5, abs=4 * np.std(degrees) / math.sqrt(100))


# --- mixing matrices ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixing", list(MIXINGS))
@pytest.mark.parametrize("name", GRAPHS)
def test_every_pair_is_doubly_stochastic_or_refused(name: str, mixing: str, tmp_path: Path) -> None:
    graph = built(name, tmp_path)
    assert graph is not None
    degrees = {degree for _, degree in graph.degree}
    suits = {"uniform": degrees == {NODES - 1}, "uniform-neighbour": len(degrees) == 1}.get(mixing, True)
    if not suits:
        with pytest.raises(HoldfastError, match=f"mixing '{mixing}' needs"):
            Network.of(graph, mixing)
        return
    network = Network.of(graph, mixing)
    assert isinstance(network.weights, csr_array)
    assert network.weights.dtype == np.float64
    W = network.dense()
    np.testing.assert_allclose(W, W.T, rtol=0, atol=1e-15)
    np.testing.assert_allclose(W.sum(axis=0), 1, rtol=0, atol=1e-14)
    assert (W >= 0).all()
    np.testing.assert_array_equal(W - np.diag(W.diagonal()) > 0, nx.to_numpy_array(graph, range(NODES)) > 0)
    assert network.spectral_lambda == pytest.approx(np.linalg.norm(W - 1 / NODES, 2), abs=1e-13)
    assert 0 <= network.spectral_lambda < 1


def test_metropolis_weights_by_hand() -> None:
    # a path 0 - 1 - 2: both links have the middle's degree two
    expected = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
    np.testing.assert_allclose(topology.metropolis(topology.line(3)).toarray(), expected, atol=1e-16)


def test_laplacian_weights_by_hand() -> None:
    # lambda_max of a path of three is 3, so each link weighs 2/9
    expected = np.array([[7, 2, 0], [2, 5, 2], [0, 2, 7]]) / 9
    np.testing.assert_allclose(topology.laplacian(topology.line(3)).toarray(), expected, atol=1e-15)


def test_laplacian_eigenvalues_are_at_least_a_third() -> None:
    W = Network.of(topology.erdos_renyi(30, 0.2, seed=0), "laplacian").dense()
    assert np.linalg.eigvalsh(W)[0] == pytest.approx(1 / 3, abs=1e-14)


def test_uniform_is_j() -> None:
    np.testing.assert_array_equal(topology.uniform(topology.complete(8)).toarray(), np.full((8, 8), 1 / 8))


def test_uniform_neighbour_on_a_star_is_row_stochastic_if_allowed() -> None:
    network = Network.of(topology.star(10), "uniform-neighbour", allow_row_stochastic=True)
    W = network.dense()
    np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-15)
    np.testing.assert_allclose(W.sum(axis=0), [4.6] + 9 * [0.6], atol=1e-14)
    assert network.spectral_lambda == pytest.approx(np.linalg.norm(W - 0.1, 2), abs=1e-14)


def test_edge_attributes_do_not_change_the_weights() -> None:
    graph = topology.ring(5)
    nx.set_edge_attributes(graph, 7.0, "weight")
    np.testing.assert_array_equal(
        topology.metropolis(graph).toarray(), topology.metropolis(topology.ring(5)).toarray()
    )


# --- size: beyond 1500 nodes no dense matrix is made --------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "nodes", "exact"),
    [
        (topology.ring, 2000, 1 / 3 + 2 / 3 * math.cos(2 * math.pi / 2000)),
        (topology.line, 2001, 1 / 3 + 2 / 3 * math.cos(math.pi / 2001)),
        (topology.torus, 1600, 1 / 5 + 2 / 5 + 2 / 5 * math.cos(2 * math.pi / 40)),
        (topology.star, 1600, 1 - 1 / 1600),
        (topology.hypercube, 2048, 1 - 2 / 12),
    ],
)
def test_lambda_of_large_networks_has_the_closed_form(
    make: Callable[[int], nx.Graph], nodes: int, exact: float
) -> None:
    # eigenvalues of size one in float64: a few units in the last place
    assert Network.of(make(nodes)).spectral_lambda == pytest.approx(exact, abs=1e-13)


def test_lambda_of_a_large_network_whose_most_negative_eigenvalue_decides() -> None:
    # lazy by 1/20 only, so eigenvalues run from 1/20 - 19/20 to 1; the second largest is 1 - (19/20)(2/11)
    graph = topology.hypercube(2048)
    W = 0.95 / 11 * nx.to_scipy_sparse_array(graph, nodelist=range(2048)) + csr_array(0.05 * np.eye(2048))
    assert Network.of(graph, W).spectral_lambda == pytest.approx(0.9, abs=1e-13)


def test_large_laplacian_networks_have_the_closed_form() -> None:
    angles = 2 * math.pi * np.arange(2000) / 2000
    eigenvalues = 4 - 2 * np.cos(angles) - 2 * np.cos(2 * angles)  # of the double ring's Laplacian
    exact = 1 - 2 / 3 * eigenvalues[1] / eigenvalues.max()
    network = Network.of(topology.double_ring(2000), "laplacian")
    assert network.spectral_lambda == pytest.approx(exact, abs=1e-13)


def test_ring_of_ten_thousand_needs_no_dense_matrix() -> None:
    tracemalloc.start()
    network = Network.of(topology.ring(10_000))
    gap = 1 - network.spectral_lambda
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6  # bytes; a dense matrix would take 800e6
    # 1.3e-7, of which float64 keeps about nine digits next to one
    assert gap == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / 10_000)), rel=1e-7)
    assert network.weights.nnz == 30_000
    assert network.directed_links == 20_000
