"""Graphs: who talks to whom. Nodes are 0..n-1; links are undirected and unweighted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import networkx as nx
import numpy as np
from pydantic import Field

from holdfast.core.errors import HoldfastError
from holdfast.core.memory import require_memory
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, Positive, Seed

if TYPE_CHECKING:
    Graph = nx.Graph[int]
else:
    Graph = nx.Graph  # cannot be subscripted at run time

MAX_DRAWS = 200
"""Random graphs are drawn at most this often before we say that the chosen parameters do not connect."""

BYTES_PER_LINK = 500
"""What a link takes up in networkx graphs and sparse matrices, measured on complete graphs."""

TwoOrMore = Annotated[int, Field(ge=2)]
FiveOrMore = Annotated[int, Field(ge=5)]
LinkProbability = Annotated[float, Field(ge=1e-12, le=1)]

# They make a Graph, a Network where the weights are the topology's own, or None for a server.
TOPOLOGIES: Registry[object] = Registry("topology", context=("nodes", "seed"))
"""All topologies by name: a graph, a network with weights of its own, or ``None`` for a server."""


@TOPOLOGIES.register_checked("server")
def _server(nodes: Count) -> None:
    """A server that averages everybody; nodes have no links among themselves."""


@TOPOLOGIES.register_checked("ring")
def ring(nodes: TwoOrMore) -> Graph:
    """Each node has the two links i ± 1; two nodes share one link."""
    graph: Graph = nx.cycle_graph(nodes)
    return graph


@TOPOLOGIES.register_checked("double-ring")
def double_ring(nodes: FiveOrMore) -> Graph:
    """Each node has the four links i ± 1 and i ± 2."""
    return nx.circulant_graph(nodes, [1, 2])


@TOPOLOGIES.register_checked("complete")
def complete(nodes: TwoOrMore) -> Graph:
    """Everybody is linked with everybody."""
    require_memory(f"topology 'complete' with {nodes} nodes", BYTES_PER_LINK * nodes**2 / 2)
    graph: Graph = nx.complete_graph(nodes)
    return graph


@TOPOLOGIES.register_checked("star")
def star(nodes: TwoOrMore) -> Graph:
    """Node 0 is linked with everybody; there are no other links."""
    graph: Graph = nx.star_graph(nodes - 1)
    return graph


@TOPOLOGIES.register_checked("line")
def line(nodes: TwoOrMore) -> Graph:
    """A ring with one link cut."""
    graph: Graph = nx.path_graph(nodes)
    return graph


@TOPOLOGIES.register_checked("torus")
def torus(nodes: TwoOrMore, rows: TwoOrMore | None = None) -> Graph:
    """A grid whose borders are glued together; as square as can be unless `rows` is given.

    Node ``r * columns + c`` sits in row r and column c. Nodes have degree 4, less where a side has only two.
    """
    choices = [count for count in range(2, nodes // 2 + 1) if nodes % count == 0]
    if not choices:
        raise HoldfastError(
            f"topology 'torus': {nodes} nodes do not fill two or more rows and columns; "
            f"use a number that is not prime, such as {max(nodes + 1, 4)}, or topology 'ring'"
        )
    if rows is None:
        rows = max(count for count in choices if count * count <= nodes)
    elif rows not in choices:
        raise HoldfastError(
            f"topology 'torus': {nodes} nodes do not fill {rows} rows of two or more; "
            f"choose rows from {', '.join(map(str, choices))}"
        )
    grid = nx.grid_2d_graph(rows, nodes // rows, periodic=True)
    return nx.convert_node_labels_to_integers(grid, ordering="sorted")


@TOPOLOGIES.register_checked("hypercube")
def hypercube(nodes: TwoOrMore) -> Graph:
    """Nodes are linked if their numbers differ in one bit; needs a power of two."""
    dimensions = nodes.bit_length() - 1
    if nodes != 2**dimensions:
        raise HoldfastError(
            f"topology 'hypercube': the number of nodes must be a power of two, got {nodes}; "
            f"use {2**dimensions} or {2 ** (dimensions + 1)}"
        )
    return nx.convert_node_labels_to_integers(nx.hypercube_graph(dimensions), ordering="sorted")


@TOPOLOGIES.register_checked("exponential")
def exponential(nodes: TwoOrMore) -> Graph:
    """Each node has the links i ± 1, 2, 4, 8, ...: few links, yet fast mixing."""
    return nx.circulant_graph(nodes, [2**k for k in range((nodes - 1).bit_length())])


@TOPOLOGIES.register_checked("erdos-renyi")
def erdos_renyi(nodes: TwoOrMore, p: LinkProbability, seed: Seed) -> Graph:
    """Each pair is linked with probability p; drawn again until connected."""
    require_memory(
        f"topology 'erdos-renyi' with {nodes} nodes and p={p:g}", BYTES_PER_LINK * p * nodes**2 / 2
    )
    rng = np.random.default_rng(seed)
    return _first_connected(
        lambda: nx.fast_gnp_random_graph(nodes, p, seed=rng),
        f"topology 'erdos-renyi' with {nodes} nodes and p={p:g}",
        f"raise p (connected graphs become likely above {math.log(nodes) / nodes:.2g})",
    )


@TOPOLOGIES.register_checked("random-geometric")
def random_geometric(nodes: TwoOrMore, radius: Positive, seed: Seed) -> Graph:
    """Random points of the unit square, linked if at most `radius` apart; drawn again until connected.

    The points are kept in the node attribute ``pos``.
    """
    rng = np.random.default_rng(seed)

    def draw() -> Graph:
        points = rng.random((nodes, 2)).tolist()
        return nx.random_geometric_graph(nodes, radius, pos=dict(enumerate(points)))

    return _first_connected(
        draw,
        f"topology 'random-geometric' with {nodes} nodes and radius={radius:g}",
        "raise the radius (connected graphs become likely above "
        f"{math.sqrt(math.log(nodes) / (math.pi * nodes)):.2g})",
    )


def _first_connected(draw: Callable[[], Graph], what: str, advice: str) -> Graph:
    for _ in range(MAX_DRAWS):
        graph = draw()
        if nx.is_connected(graph):
            return graph
    raise HoldfastError(f"{what}: {MAX_DRAWS} draws gave no connected graph; {advice}")


@TOPOLOGIES.register_checked("edge-list")
def edge_list(nodes: TwoOrMore, path: str | Path) -> Graph:
    """Links from a text file: one pair of node numbers `i j` per line.

    Blank lines and whatever follows a ``#`` are comments. A link may be given in both directions.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not a text file"
        raise HoldfastError(f"topology 'edge-list': cannot read {str(path)!r}: {reason}") from None
    graph: Graph = nx.empty_graph(nodes)
    for number, text in enumerate(lines, start=1):
        words = text.split("#", 1)[0].split()
        if words:
            graph.add_edge(*_link(f"topology 'edge-list': {path}, line {number}", words, nodes))
    alone = list(nx.isolates(graph))
    if alone:
        raise HoldfastError(
            f"topology 'edge-list': {path} has no link for {shorten(alone)} of {nodes} nodes; "
            "add links or set the number of nodes to that of the file"
        )
    return graph


def _link(where: str, words: list[str], nodes: int) -> tuple[int, int]:
    if len(words) != 2 or not all(word.isdecimal() and len(word) < 20 for word in words):
        raise HoldfastError(f"{where}: expected two node numbers 'i j', got {' '.join(words)[:60]!r}")
    first, second = int(words[0]), int(words[1])
    if max(first, second) >= nodes:
        raise HoldfastError(
            f"{where}: node {max(first, second)} is out of range, as {nodes} nodes are 0 to {nodes - 1}"
        )
    if first == second:
        raise HoldfastError(f"{where}: node {first} is linked with itself; remove the line")
    return first, second


def shorten(numbers: list[int]) -> str:
    """Node numbers for a message: ``node 3``, ``nodes 3, 4``, ``nodes 0, 1, 2, 3, 4 and 95 more``."""
    shown = ", ".join(map(str, numbers[:5]))
    more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    return f"node{'s' if len(numbers) > 1 else ''} {shown}{more}"
