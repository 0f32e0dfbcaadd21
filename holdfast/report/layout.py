"""Where the nodes of a network are drawn, in pictures and in pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.experiments.record_files import WeightedLink

ON_A_CIRCLE_UP_TO = 60  # nodes
DRAWN_UP_TO = 300  # nodes


def node_places(nodes: int, links: Sequence[WeightedLink], *, is_server: bool) -> np.ndarray:
    """[nodes, 2]: on a circle, clockwise from the top, or where springs along the links pull them."""
    if nodes <= ON_A_CIRCLE_UP_TO or is_server:
        angles = np.pi / 2 - 2 * np.pi * np.arange(nodes) / nodes
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    import networkx as nx

    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_weighted_edges_from(links)
    places = nx.spring_layout(graph, weight=None, iterations=200, seed=0)
    return np.array([places[node] for node in range(nodes)])
