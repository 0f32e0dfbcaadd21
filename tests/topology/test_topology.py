"""Graphs and networks against their definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from sample_graphs import GRAPHS, NODES, built, ring_weights
from scipy.sparse import csr_array, csr_matrix

import holdfast.topology as topology
from holdfast.topology import Network, build_network, server

# --- graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_every_topology_is_connected_plain_and_complete_in_its_nodes(name: str, tmp_path: Path) -> None:
    graph = built(name, tmp_path)
    assert graph is not None
    assert sorted(graph) == list(range(NODES))
    assert nx.is_connected(graph)
    assert nx.number_of_selfloops(graph) == 0
    assert not graph.is_directed()


@pytest.mark.parametrize(
    ("graph", "links"),
    [
        (topology.ring(4), {(0, 1), (1, 2), (2, 3), (0, 3)}),
        (topology.ring(2), {(0, 1)}),
        (
            topology.double_ring(6),
            {(i, j) for i in range(6) for j in range(i + 1, 6)} - {(0, 3), (1, 4), (2, 5)},
        ),
        (topology.complete(4), {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}),
        (topology.star(4), {(0, 1), (0, 2), (0, 3)}),
        (topology.line(4), {(0, 1), (1, 2), (2, 3)}),
        # two rows of three: 0 1 2 / 3 4 5, each row closed to a ring
        (topology.torus(6), {(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5), (0, 3), (1, 4), (2, 5)}),
        (topology.hypercube(4), {(0, 1), (0, 2), (1, 3), (2, 3)}),
        (topology.exponential(7), {(i, j) for i in range(7) for j in range(i + 1, 7)}),
    ],
)
def test_links_are_those_of_the_definition(graph: nx.Graph, links: set[tuple[int, int]]) -> None:
    assert {tuple(sorted(edge)) for edge in graph.edges} == links


def test_exponential_graph_has_the_powers_of_two() -> None:
    assert sorted(topology.exponential(32)[0]) == [1, 2, 4, 8, 16, 24, 28, 30, 31]


def test_hypercube_links_differ_in_one_bit() -> None:
    graph = topology.hypercube(16)
    assert graph.number_of_edges() == 32
    assert all((i ^ j).bit_count() == 1 for i, j in graph.edges)


def test_torus_is_as_square_as_can_be_and_takes_rows() -> None:
    assert sorted(topology.torus(12)[0]) == [1, 3, 4, 8]  # 3 rows of 4
    assert sorted(topology.torus(18, rows=6)[0]) == [1, 2, 3, 15]
    assert {degree for _, degree in topology.torus(25).degree} == {4}


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed: topology.erdos_renyi(20, 0.12, seed),
        lambda seed: topology.random_geometric(10, 0.3, seed),
    ],
)
def test_random_graphs_are_connected_and_follow_the_seed(draw: Any) -> None:
    # about one draw in seven, and one in twenty-four, is connected: only redrawing makes all ten so
    graphs = [draw(seed) for seed in range(10)]
    assert all(nx.is_connected(graph) for graph in graphs)
    assert nx.utils.graphs_equal(graphs[4], draw(4))
    assert len({frozenset(graph.edges) for graph in graphs}) == 10


def test_geometric_graph_links_exactly_the_close_points() -> None:
    graph = topology.random_geometric(30, 0.35, seed=1)
    points = np.array([graph.nodes[node]["pos"] for node in range(30)])
    assert points.shape == (30, 2)
    assert ((points >= 0) & (points <= 1)).all()
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    expected = (distance <= 0.35) & ~np.eye(30, dtype=bool)
    np.testing.assert_array_equal(nx.to_numpy_array(graph, nodelist=range(30)) > 0, expected)


def test_edge_list_reads_comments_blank_lines_and_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "links.txt"
    file.write_text("# a triangle with a tail\n0 1\n1 0\n\n1\t2  # tab\n2 0\r\n2 3\n", encoding="utf-8")
    assert {tuple(sorted(edge)) for edge in topology.edge_list(4, file).edges} == {
        (0, 1),
        (1, 2),
        (0, 2),
        (2, 3),
    }


# --- networks -----------------------------------------------------------------------------------------------


def test_network_of_a_star() -> None:
    network = Network.of(topology.star(4))
    assert network.nodes == 4
    assert not network.is_server
    assert network.directed_links == 6
    assert network.degrees.tolist() == [3, 1, 1, 1]
    assert network.neighbours(0).tolist() == [1, 2, 3]
    assert network.neighbours(2).tolist() == [0]
    assert network.links().tolist() == [[0, 1], [0, 2], [0, 3]]
    assert network.adjacency.toarray().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_network_of_a_server() -> None:
    network = server(5)
    assert network.is_server
    assert network.graph is None
    assert network.weights is None
    assert network.directed_links == 10
    assert network.degrees.tolist() == [0] * 5
    assert network.neighbours(3).tolist() == []
    assert network.links().shape == (0, 2)
    assert network.adjacency.nnz == 0
    assert network.spectral_lambda == 0.0
    assert network.mixing_parameter == 1.0
    np.testing.assert_array_equal(network.dense(), np.full((5, 5), 0.2))


def test_one_exchange_shrinks_disagreement_by_lambda_at_worst() -> None:
    network = Network.of(topology.erdos_renyi(12, 0.3, seed=5))
    W, J = network.dense(), np.full((12, 12), 1 / 12)
    X = np.random.default_rng(0).standard_normal((12, 1000))
    factors = np.linalg.norm(W @ X - J @ X, axis=0) / np.linalg.norm(X - J @ X, axis=0)
    assert factors.max() <= network.spectral_lambda + 1e-12
    slowest = np.linalg.eigh(W @ W - J)[1][:, -1]
    assert np.linalg.norm(W @ slowest) == pytest.approx(network.spectral_lambda, abs=1e-12)


def test_later_changes_of_the_users_graph_do_not_reach_the_network() -> None:
    graph = topology.ring(5)
    network = Network.of(graph)
    graph.remove_edge(0, 1)
    assert network.neighbours(0).tolist() == [1, 4]
    with pytest.raises(nx.NetworkXError):
        network.graph.remove_edge(0, 1)


@pytest.mark.parametrize("convert", [np.asarray, csr_array, csr_matrix])
def test_a_users_own_matrix(convert: Any) -> None:
    W = ring_weights(0.2)
    network = Network.of(topology.ring(4), convert(W))
    np.testing.assert_array_equal(network.dense(), W)
    assert network.spectral_lambda == pytest.approx(0.6, abs=1e-15)  # eigenvalues 0.6 + 0.4 cos(k 90°)
    assert network.weights.nnz == 12


def test_a_users_own_graph_with_its_nodes_in_any_order() -> None:
    graph = nx.Graph([(3, 1), (1, 0), (0, 2)])
    network = Network.of(graph)
    assert network.links().tolist() == [[0, 1], [0, 2], [1, 3]]
    assert network.dense()[0, 3] == 0


def test_build_network_by_names() -> None:
    network = build_network("torus", {"rows": 2}, "laplacian", {}, nodes=8, seed=0)
    assert network.degrees.tolist() == [3] * 8
    np.testing.assert_array_equal(network.dense(), topology.laplacian(topology.torus(8, rows=2)).toarray())
    default = build_network("ring", {}, None, {}, nodes=5, seed=0)
    np.testing.assert_array_equal(default.dense(), topology.metropolis(topology.ring(5)).toarray())
    assert build_network("server", {}, None, {}, nodes=5, seed=0).is_server
    first, second, other = (
        build_network("erdos-renyi", {"p": 0.4}, None, {}, nodes=12, seed=seed) for seed in (1, 1, 2)
    )
    assert first.links().tolist() == second.links().tolist() != other.links().tolist()


def test_a_network_shows_itself_in_one_line() -> None:
    assert repr(Network.of(topology.ring(5))) == "Network(5 nodes, 5 links)"
    assert repr(server(3)) == "Network(3 nodes and a server)"
    assert repr(topology.base_graph(25)) == "Network(25 nodes, links change, period 9)"
