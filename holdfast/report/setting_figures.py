"""The partition of the data and the network as pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from holdfast.experiments.record import RunRecord, overlaid
from holdfast.experiments.record_files import DELAY_COLUMNS, MEMBER_COLUMNS, SOLVER_COLUMNS, WeightedLink
from holdfast.report.figures import AXES, FAINT, GRID, INK, curves_figure, quiet
from holdfast.report.format import quantity, recorded_metrics
from holdfast.report.styles import COLOURS, DRAWN_UP_TO, ON_A_CIRCLE_UP_TO, node_places

# --- the partition of the data and the network as pictures ----------------------------------------------


NAMED_UP_TO = 12  # nodes whose names are written


def partition_figure(
    table: np.ndarray, classes: Sequence[str] | None = None, called: Sequence[str] | None = None
) -> Figure:
    """Heat map of a table [n, classes]: how many samples of each class every node owns.

    ``called``: what the nodes are called, such as hospitals; their numbers if nothing is given.
    """
    nodes, columns = table.shape
    names_of_nodes = called or [str(node) for node in range(nodes)]
    names = list(classes) if classes is not None else [str(label) for label in range(columns)]
    with_counts = nodes <= 30 and columns <= 20
    figure = Figure(figsize=(6.4, min(8.0, max(2.6, 1.1 + 0.27 * nodes))), layout="constrained")
    axes = figure.add_subplot()
    mesh = axes.pcolormesh(
        np.ma.masked_equal(table, 0),
        cmap="Blues",
        norm=PowerNorm(0.5, vmin=0, vmax=max(1, table.max())),  # so that a few samples differ from none
        edgecolors=GRID if with_counts else "none",
        linewidth=0.5,
        rasterized=table.size > 2000,
    )
    axes.invert_yaxis()
    for node, label in zip(*np.nonzero(table), strict=True) if with_counts else ():
        count = int(table[node, label])
        colour = "#ffffff" if count > 0.4 * table.max() else "#08306b"
        axes.text(label + 0.5, node + 0.5, f"{count}", ha="center", va="center", size=8, color=colour)
    axes.set_xlabel("class")
    if columns <= 30:
        axes.set_xticks(np.arange(columns) + 0.5, names)
        if max(map(len, names)) > 3:
            axes.tick_params(axis="x", rotation=35)
    if nodes <= 40:
        axes.set_yticks(
            np.arange(nodes) + 0.5,
            [f"{name}  ({total:,})" for name, total in zip(names_of_nodes, table.sum(1), strict=True)],
        )
        axes.set_ylabel("node (samples)")
    else:
        axes.set_ylabel("node")
    if not with_counts:
        bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=30, label="samples of the class")
        quiet(bar.ax)
    quiet(axes)
    axes.spines[:].set_visible(False)
    return figure


def network_figure(
    nodes: int, links: Sequence[WeightedLink], is_server: bool, called: Sequence[str] | None = None
) -> Figure:
    """The graph, nodes on a circle; with a server, the hub in the middle.

    ``called``: what the nodes are called; a few names are written beside their numbers.
    """
    figure = Figure(figsize=(4.4, 4.4), layout="constrained")
    axes = figure.add_subplot(aspect="equal")
    axes.axis("off")
    if nodes > DRAWN_UP_TO:
        words = f"{nodes:,} nodes" + (" around a server" if is_server else f", {len(links):,} links")
        axes.text(0.5, 0.5, f"{words}:\ntoo many to draw", ha="center", va="center", color=INK)
        return figure
    at = node_places(nodes, links, is_server=is_server)
    if is_server:
        lines, weights = [[(0.0, 0.0), tuple(place)] for place in at], np.ones(nodes)
    else:
        lines, weights = (
            [[tuple(at[i]), tuple(at[j])] for i, j, _ in links],
            np.array([w for _, _, w in links]),
        )
    crowd = math.sqrt(10 / max(nodes, 10))  # things shrink as the nodes get many
    widths = 0.4 + 1.4 * crowd * weights / weights.max(initial=1e-12)
    alpha = min(0.8, 6 / math.sqrt(max(1, len(lines))))
    axes.add_collection(LineCollection(lines, colors=FAINT, linewidths=list(widths), alpha=alpha, zorder=1))
    axes.scatter(at[:, 0], at[:, 1], s=460 * crowd**2, color=COLOURS[0], zorder=2)
    if nodes <= ON_A_CIRCLE_UP_TO:
        for node, (x, y) in enumerate(at):
            axes.text(
                x,
                y,
                f"{node}",
                ha="center",
                va="center_baseline",
                color="#ffffff",
                size=10 * crowd**0.65,
                zorder=3,
            )
    if is_server:
        axes.scatter([0], [0], s=1500, marker="s", color=COLOURS[1], zorder=2)
        axes.text(0, 0, "server", ha="center", va="center_baseline", color="#ffffff", size=9, zorder=3)
    if called is not None and nodes <= NAMED_UP_TO:
        for name, (x, y) in zip(called, at, strict=True):
            side = "center" if abs(x) < 0.3 else "left" if x > 0 else "right"
            axes.annotate(
                name,
                (x, y),
                xytext=(14 * x, 16 * y),
                textcoords="offset points",
                ha=side,
                va="center",
                color=INK,
                size=8,
            )
    axes.margins(0.08)
    return figure


# --- which pictures a run gets, and what is said under each ---------------------------------------------


class Plot(NamedTuple):
    """A picture with the name of its file and one line on how to read it."""

    stem: str
    caption: str
    figure: Figure


def curve_plots(records: Sequence[RunRecord]) -> Iterator[Plot]:
    """Every metric against the rounds, the first also against what it cost."""
    recorded = recorded_metrics(records)
    costs = (*DELAY_COLUMNS, *SOLVER_COLUMNS, *MEMBER_COLUMNS)
    metrics = [metric for metric in recorded if metric not in costs]
    axes = [axis for axis in AXES if axis not in DELAY_COLUMNS or axis in recorded]
    for metric in metrics:
        for axis in axes if metric == metrics[0] else axes[:1]:
            if axis == "round" or _tells_more_than_rounds(records, axis):
                stem = metric if axis == "round" else f"{metric}_by_{axis}"
                yield Plot(stem, _caption(metric, axis), curves_figure(records, metric, axis))


def setting_plots(record: RunRecord) -> Iterator[Plot]:
    """The network, and for classification the partition; a deployed member has neither at hand."""
    if record.partition is None:
        return
    words = "All nodes talk to the server only." if not record.links else "Nodes and the links between them."
    if len({weight for _, _, weight in record.links}) > 1:
        words = "Nodes and the links between them; the thicker, the larger the mixing weight."
    nodes, names = len(record.partition.samples), record.partition.names
    yield Plot("network", words, network_figure(nodes, record.links, not record.links, names))
    if record.partition.classes:
        yield Plot(
            "partition",
            "How many samples of each class every node owns; an empty cell is none.",
            partition_figure(record.partition.counts, record.partition.classes, names),
        )


def _tells_more_than_rounds(records: Sequence[RunRecord], axis: str) -> bool:
    """Whether ``axis`` orders the curves in another way: not if a round costs the same in all of them."""
    per_round = {
        round(group.values(axis, last)[0] / last, 6)
        for record in overlaid(records)
        for group in record.groups
        if group.rounds and (last := group.rounds[-1]) > 0 and group.values(axis, last)
    }
    return len(per_round) > 1


def _caption(metric: str, axis: str) -> str:
    if axis == "round":
        return quantity(metric).reading
    return f"The same against the {quantity(axis).title}: a curve further left is cheaper."
