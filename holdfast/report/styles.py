"""The look of a curve, the same in pictures, tables and pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.experiments.record import RunRecord
from holdfast.experiments.record_files import WeightedLink

# --- the look of a curve, the same in pictures, tables and pages ----------------------------------------


# Okabe and Ito's colours, which colour-blind readers can tell apart; page.css has them lighter for the dark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
DASHES = ((0, ()), (0, (4, 2)), (0, (1.6, 1)), (0, (6, 1.5, 1, 1.5)), (0, (8, 3)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTHS = (3.2, 2.0, 1.5)  # wide below narrow: curves that coincide both stay visible


class Style(NamedTuple):
    """How a curve is drawn."""

    colour: str
    dash: tuple[int, tuple[float, ...]]
    marker: str
    width: float

    @property
    def variable(self) -> str:
        """The colour in a page, which has another shade of it in the dark."""
        return f"var(--c{COLOURS.index(self.colour)})"


def curve_styles(records: Sequence[RunRecord]) -> dict[str, Style]:
    """A style for every label, the same in all figures.

    Few curves get a colour each. Many share the colour of their algorithm and differ in dashes and markers.
    """
    groups = [group for record in records for group in record.groups]
    algorithms = list(dict.fromkeys(group.jobs[0]["algorithm"] for group in groups))
    seen: dict[str, int] = dict.fromkeys(algorithms, 0)
    styles = {}
    for order, group in enumerate(groups):
        algorithm = group.jobs[0]["algorithm"]
        place = algorithms.index(algorithm)
        alone = len(algorithms) == 1
        if len(groups) <= len(COLOURS):
            styles[group.label] = curve_style(order, order, order if alone else place)
        else:
            styles[group.label] = curve_style(order if alone else place, seen[algorithm], place)
        seen[algorithm] += 1
    return styles


def curve_style(colour: int, dash: int, width: int) -> Style:
    """A style by its numbers; each goes round."""
    return Style(
        COLOURS[colour % len(COLOURS)],
        DASHES[dash % len(DASHES)],
        MARKERS[dash % len(MARKERS)],
        WIDTHS[min(width, len(WIDTHS) - 1)],
    )


# --- where the nodes of a network are drawn, in pictures and in pages -----------------------------------


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
