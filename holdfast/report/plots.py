"""Which pictures a run gets, and what is said under each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from holdfast.experiments.columns import DELAY_COLUMNS, MEMBER_COLUMNS, SOLVER_COLUMNS
from holdfast.experiments.record import RunRecord, overlaid
from holdfast.report.figures import AXES, curves_figure
from holdfast.report.format import quantity, recorded_metrics
from holdfast.report.setting_figures import network_figure, partition_figure


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
    """Whether ``axis`` orders the curves anew: not if a round costs the same in all of them."""
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
