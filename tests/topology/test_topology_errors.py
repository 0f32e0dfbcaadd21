"""What bad graphs, mixing matrices and networks get: one line that says what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from sample_graphs import PARAMS, ring_weights

import holdfast.topology as topology
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import parameters
from holdfast.topology import TOPOLOGIES, Network, build_network, server


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(HoldfastError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("nodes", [1, 0, -3, 16.0, "16", True])
@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "server"])
def test_too_few_nodes_or_no_whole_number(name: str, nodes: Any) -> None:
    params = (PARAMS | {"edge-list": {"path": "not read"}}).get(name, {})
    seed = {"seed": 0} if "seed" in parameters(TOPOLOGIES[name]) else {}
    refused(
        lambda: TOPOLOGIES.build(name, params, nodes=nodes, seed=0), f"topology '{name}'.nodes", repr(nodes)
    )
    refused(lambda: TOPOLOGIES[name](nodes, **params, **seed), f"topology '{name}'.nodes", repr(nodes))


def test_bad_parameters_of_graphs() -> None:
    refused(lambda: topology.double_ring(4), "topology 'double-ring'.nodes", "5", "got 4")
    refused(lambda: topology.torus(7), "7 nodes do not fill", "such as 8", "'ring'")
    refused(lambda: topology.torus(3), "such as 4")
    refused(lambda: topology.torus(12, rows=5), "12 nodes do not fill 5 rows", "2, 3, 4, 6")
    refused(lambda: topology.torus(12, rows=12), "12 nodes do not fill 12 rows")
    refused(lambda: topology.torus(12, rows=1), "topology 'torus'.rows", "got 1")
    refused(lambda: topology.hypercube(10), "power of two, got 10; use 8 or 16")
    for p in (0.0, -0.1, 1.5, math.nan):
        refused(lambda p=p: topology.erdos_renyi(10, p, seed=0), "topology 'erdos-renyi'.p", f"got {p}")
    for radius in (0.0, -1.0, math.inf):
        refused(lambda r=radius: topology.random_geometric(10, r, seed=0), "radius", f"got {radius}")
    refused(lambda: topology.erdos_renyi(10, 0.5, seed=-1), "topology 'erdos-renyi'.seed", "got -1")


def test_random_graphs_that_cannot_be_connected_say_what_to_raise() -> None:
    refused(lambda: topology.erdos_renyi(50, 0.001, seed=0), "p=0.001: 200 draws", "raise p", "0.078")
    refused(lambda: topology.random_geometric(50, 0.01, seed=0), "radius=0.01: 200 draws", "0.16")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0 1\n1 2 0.5\n", ["line 2", "two node numbers", "'1 2 0.5'"]),
        ("0 1\n\n1\n", ["line 3", "'1'"]),
        ("0 a\n", ["line 1", "'0 a'"]),
        ("0 -1\n", ["line 1", "'0 -1'"]),
        ("0 1.0\n", ["line 1", "'0 1.0'"]),
        ("0 " + "9" * 5000, ["line 1", "two node numbers"]),
        ("0 1\n1 3\n", ["line 2", "node 3 is out of range", "0 to 2"]),
        ("# head\n0 1\n2 2\n", ["line 3", "node 2 is linked with itself"]),
        ("0 1\n", ["no link for node 2 of 3 nodes"]),
        ("", ["no link for nodes 0, 1, 2 of 3 nodes"]),
    ],
)
def test_bad_edge_lists_name_the_line(text: str, parts: list[str], tmp_path: Path) -> None:
    file = tmp_path / "links.txt"
    file.write_text(text, encoding="utf-8")
    refused(lambda: topology.edge_list(3, file), "topology 'edge-list'", str(file), *parts)


def test_unreadable_edge_lists(tmp_path: Path) -> None:
    refused(lambda: topology.edge_list(3, tmp_path / "none.txt"), "cannot read", "none.txt", "No such file")
    refused(lambda: topology.edge_list(3, tmp_path), "cannot read", "directory")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused(lambda: topology.edge_list(3, tmp_path / "binary"), "binary", "not a text file")


def test_disconnected_edge_list_is_refused_by_the_network(tmp_path: Path) -> None:
    file = tmp_path / "links.txt"
    file.write_text("0 1\n1 2\n3 4\n", encoding="utf-8")
    refused(
        lambda: build_network("edge-list", {"path": str(file)}, None, {}, nodes=5, seed=0),
        "the graph is not connected: 2 components, with nodes 3, 4 cut off",
    )


def test_bad_graphs() -> None:
    scattered = nx.disjoint_union(topology.ring(20), nx.empty_graph(9))
    refused(
        lambda: Network.of(scattered),
        "not connected: 10 components",
        "nodes 20, 21, 22, 23, 24 and 4 more cut off",
    )
    refused(lambda: Network.of(nx.empty_graph(3), "laplacian"), "not connected: 3 components")
    refused(lambda: Network.of(nx.path_graph(1)), "at least 2 nodes, got 1")
    refused(lambda: Network.of(nx.Graph()), "at least 2 nodes, got 0")
    refused(
        lambda: Network.of(nx.path_graph(["a", "b"])),
        "0 to 1, got 'a', 'b'",
        "convert_node_labels_to_integers",
    )
    refused(
        lambda: Network.of(nx.path_graph([1, 2, 3, 4, 5])), "0 to 4, got 1, 2, 3, ...", "convert_node_labels"
    )
    refused(lambda: Network.of(nx.path_graph([0.0, 1.0])), "got 0.0, 1.0")
    refused(lambda: Network.of(nx.Graph([(0, 1), (1, 1)])), "node 1 with itself")
    refused(lambda: Network.of(nx.DiGraph([(0, 1)])), "undirected networkx.Graph, got DiGraph")
    refused(lambda: Network.of(nx.MultiGraph([(0, 1)])), "got MultiGraph")
    refused(lambda: Network.of(np.eye(2)), "got ndarray")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({(0, 0): math.nan}, ["[0, 0] = nan is not finite"]),
        ({(1, 2): math.inf}, ["[1, 2] = inf is not finite"]),
        ({(0, 0): 1.1, (0, 1): -0.3}, ["[0, 1] = -0.3 is negative"]),
        ({(2, 2): 0.6 + 1e-11}, ["row 2 misses it by 1e-11"]),
        ({(0, 0): 0.5, (0, 1): 0.3}, ["must be symmetric", "[0, 1] = 0.1"]),
        ({(0, 0): 0.5, (0, 2): 0.1, (2, 0): 0.1, (2, 2): 0.5}, ["[0, 2] = 0.1 must be 0", "no link"]),
    ],
)
def test_bad_matrices_name_the_entry(change: dict[tuple[int, int], float], parts: list[str]) -> None:
    W = ring_weights(0.2)
    for entry, value in change.items():
        W[entry] = value
    refused(lambda: Network.of(topology.ring(4), W), "mixing matrix", *parts)


def test_rounding_in_a_matrix_is_accepted() -> None:
    W = ring_weights(0.2)
    W[2, 2] += 1e-13
    assert Network.of(topology.ring(4), W).dense()[2, 2] == W[2, 2]


def test_bad_mixings() -> None:
    graph = topology.ring(4)
    refused(lambda: Network.of(graph, np.eye(3)), "expected shape (4, 4)", "got (3, 3)")
    refused(lambda: Network.of(graph, np.ones((4, 3)) / 3), "got (4, 3)")
    refused(lambda: Network.of(graph, np.ones(4)), "2-D numpy array", "ndarray of shape (4,)")
    refused(lambda: Network.of(graph, None), "got NoneType")
    refused(lambda: Network.of(graph, ring_weights(0.2) + 0j), "real numbers, got dtype complex128")
    refused(
        lambda: Network.of(graph, np.eye(4)), "mixing matrix leaves the nodes not connected: 4 components"
    )
    refused(
        lambda: Network.of(graph, ring_weights(0.2), allow_row_stochastic=True),
        "allow_row_stochastic",
        "matrix",
    )
    refused(
        lambda: Network.of(graph, "metropolic"), "unknown mixing 'metropolic'", "did you mean 'metropolis'"
    )
    refused(lambda: Network.of(graph, "metropolis", lazy=True), "unknown key in mixing 'metropolis' 'lazy'")
    refused(
        lambda: Network.of(topology.star(4), "uniform-neighbour"), "range from 1 to 3", "allow_row_stochastic"
    )
    refused(lambda: Network.of(graph, "uniform"), "only 4 of 6 pairs are linked")


def test_lambda_of_large_row_stochastic_weights_is_refused() -> None:
    network = Network.of(topology.line(1501), "uniform-neighbour", allow_row_stochastic=True)
    refused(lambda: network.spectral_lambda, "limited to 1500 nodes, got 1501", "metropolis")


def test_bad_networks_by_name() -> None:
    def build(name: str, params: dict[str, Any], mixing: str | None = None, **options: Any) -> None:
        build_network(name, params, mixing, options, nodes=5, seed=0)

    refused(lambda: build("rings", {}), "unknown topology 'rings'", "did you mean 'ring'")
    refused(lambda: build("ring", {"nodes": 3}), "unknown key in topology 'ring' 'nodes'")
    refused(lambda: build("erdos-renyi", {}), "topology 'erdos-renyi'", "'p' is missing")
    refused(lambda: build("erdos-renyi", {"p": "half"}), "topology 'erdos-renyi'.p", "'half'")
    refused(lambda: build("server", {}, "metropolis"), "leave the mixing out, got 'metropolis'")
    refused(lambda: build("ring", {}, "metro"), "unknown mixing 'metro'")
    refused(lambda: server(0), "server.nodes", "got 0")
