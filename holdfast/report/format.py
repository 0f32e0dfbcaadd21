"""Numbers and names in readable form, the same in terminal, figures and HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.experiments.record import FinalRow, RunRecord, Spread

KIB = 1024
OF_ONE_NODE = r"_node(\d+)$"  # the end of a column such as accuracy_node3


@dataclass(frozen=True)
class Quantity:
    """How a column of ``metrics.csv`` is shown."""

    title: str  # on axes and in captions
    short: str  # over a column of a table
    reading: str = ""  # one sentence: how to read its curve
    better: Literal["high", "low", ""] = ""
    kind: Literal["accuracy", "number", "bytes", "count", "seconds"] = "number"
    decades: bool = False  # drawn on a logarithmic axis when its values span more than one decade


QUANTITIES: dict[str, Quantity] = {
    "test_accuracy": Quantity(
        "mean test accuracy",
        "accuracy",
        "Test accuracy, averaged over the nodes' own models: higher is better.",
        "high",
        "accuracy",
    ),
    "worst_accuracy": Quantity(
        "test accuracy of the worst node",
        "worst node",
        "Test accuracy of the node that does worst: a gap to the mean shows nodes left behind.",
        "high",
        "accuracy",
    ),
    "average_accuracy": Quantity(
        "test accuracy of the average model",
        "average model",
        "Test accuracy of the average of all nodes' models: higher is better.",
        "high",
        "accuracy",
    ),
    "average_loss": Quantity(
        "test loss of the average model",
        "test loss",
        "Test loss of the average of all nodes' models: lower is better.",
        "low",
        decades=True,
    ),
    "minibatch_loss": Quantity(
        "loss of the round's minibatches",
        "minibatch loss",
        "The loss of the round's own minibatches, at the nodes' models during local steps: lower is better.",
        "low",
        decades=True,
    ),
    "train_loss": Quantity(
        "training loss",
        "train loss",
        "The common objective at the average model: lower is better.",
        "low",
        decades=True,
    ),
    "consensus": Quantity(
        "consensus error",
        "consensus",
        "Mean squared distance of the nodes' models from their average: lower means that the nodes agree.",
        "low",
        decades=True,
    ),
    "grad_norm2": Quantity(
        "squared gradient norm",
        "gradient²",
        "Squared norm of the global gradient at the average model: zero at a true optimum.",
        "low",
        decades=True,
    ),
    "stationarity": Quantity(
        "stationarity",
        "stationarity",
        "Squared gradient norm plus consensus error: zero where all nodes agree on an optimum.",
        "low",
        decades=True,
    ),
    "rel_energy": Quantity(
        "relative energy error",
        "energy error",
        "(f - f*) / f* at the average model: how far the objective still is from its optimum.",
        "low",
        decades=True,
    ),
    "optimum_distance": Quantity(
        "distance to the optimum",
        "distance",
        "Distance of the average model from the optimum: zero when solved.",
        "low",
        decades=True,
    ),
    "dual_error": Quantity(
        "dual error",
        "dual error",
        "Squared distance of the nodes' corrections from their gradients at the optimum.",
        "low",
        decades=True,
    ),
    "epsilon": Quantity("epsilon", "epsilon", "Privacy spent by the node that spent most, for its delta."),
    "tau_proc": Quantity("processing delay", "processing", "Cumulative processing delay, as in DSpodFL."),
    "tau_trans": Quantity("transmission delay", "transmission", "Cumulative transmission delay."),
    "tau_total": Quantity("total delay", "delay", "Cumulative delay of computing and transmitting."),
    "tau_raw": Quantity(
        "total delay, 1/d and 1/b as times", "raw delay", "As the total, but not normalised."
    ),
    "value_evaluations": Quantity("values computed by local solvers", "values", kind="count"),
    "unfinished_solves": Quantity("local solves that missed their tolerance", "unfinished", kind="count"),
    "local_loss": Quantity(
        "loss on the node's own data",
        "local loss",
        "The objective on the node's own data, at its own model: lower is better.",
        "low",
        decades=True,
    ),
    "test_loss": Quantity(
        "test loss",
        "test loss",
        "Loss on the node's own test split, at its own model: lower is better.",
        "low",
        decades=True,
    ),
    "wire_bytes_sent": Quantity("data sent, repetitions included", "sent", kind="bytes"),
    "wire_bytes_received": Quantity("data received", "received", kind="bytes"),
    "waiting_seconds": Quantity("time spent on exchanges", "waiting", kind="seconds"),
    "payload_bytes": Quantity("data sent by all nodes", "traffic", kind="bytes"),
    "payload_bytes_per_link": Quantity("data sent per link", "per link", kind="bytes"),
    "gradient_evaluations": Quantity("gradients computed by all nodes", "gradients", kind="count"),
    "sample_gradients": Quantity("sample gradients computed by all nodes", "sample gradients", kind="count"),
    "seconds": Quantity("time", "time", kind="seconds"),
    "round": Quantity("communication round", "round", kind="count"),
}


def quantity(column: str) -> Quantity:
    """How ``column`` is shown; one without an entry shows its own name."""
    return QUANTITIES.get(column) or Quantity(column.replace("_", " "), column.replace("_", " "))


def recorded_metrics(records: Sequence[RunRecord]) -> list[str]:
    """All metrics that any of the records has, in their usual order; those of single nodes are left out."""
    found = list(dict.fromkeys(metric for record in records for metric in record.metrics))
    usual = list(QUANTITIES)
    return sorted(
        (metric for metric in found if not re.search(OF_ONE_NODE, metric)),
        key=lambda metric: usual.index(metric) if metric in usual else len(usual),
    )


def metric_title(column: str) -> str:
    """The heading of a column of a table, such as 'accuracy (%)'."""
    return quantity(column).short + (" (%)" if quantity(column).kind == "accuracy" else "")


def format_value(column: str, value: float, digits: int = 4) -> str:
    """A value of ``column`` with its unit where it needs one; accuracies in percent, without the sign."""
    kind = quantity(column).kind
    if kind == "accuracy":
        return f"{100 * value:.1f}"
    if kind == "bytes":
        return bytes_text(value, digits)
    if kind == "count":
        return count_text(value)
    if kind == "seconds":
        return seconds_text(value)
    return number_text(value, digits)


def spread_text(column: str, spread: Spread) -> str:
    """Mean ± standard deviation; the mean alone for a single seed."""
    mean = format_value(column, spread.mean)
    return f"{mean} ± {format_value(column, spread.std, digits=2)}" if spread.std is not None else mean


def number_text(value: float, digits: int = 4) -> str:
    """So many significant digits, such as 0.1234, 12.34; one less in 1.23e-05."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 2}e}"


def byte_unit(value: float) -> tuple[int, str]:
    """The largest binary unit that leaves ``value`` at one or more: its bytes and its name."""
    size, name = 1, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < size * KIB:
            break
        size, name = size * KIB, larger
    return size, name


def bytes_text(value: float, digits: int = 4) -> str:
    """Such as 45.94 GiB."""
    size, name = byte_unit(value)
    return f"{value:,.0f} B" if size == 1 else f"{_decimals(value / size, digits)} {name}"


def count_text(value: float) -> str:
    """Such as 32,000 or 1.25 M."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{_decimals(value / size, 3)} {name}"
    return f"{value:,.0f}"


def seconds_text(value: float) -> str:
    """Such as 8.3 s, 2 min 5 s or 1 h 2 min."""
    if value < 59.95:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def round_text(row: FinalRow) -> str:
    """The round that the figures are of, and how many were planned where that differs."""
    if row.round == row.rounds:
        return str(row.round)
    return f"{'–' if row.round is None else row.round}/{row.rounds}"


def best_lines(rows: Sequence[FinalRow], column: str, digits: int = 4) -> set[int]:
    """Lines whose figure, as shown, is the best of those that are done and of the same problem.

    Where all are alike, none is best.
    """
    best: set[int] = set()
    better = quantity(column).better
    for contest in {row.contest for row in rows} if better else ():
        shown = {
            line: (row.values[column].mean, format_value(column, row.values[column].mean, digits))
            for line, row in enumerate(rows)
            if row.defined(column) and row.status == "done" and row.contest == contest
        }
        if len({text for _, text in shown.values()}) > 1:
            _, winner = max(shown.values()) if better == "high" else min(shown.values())
            best |= {line for line, (_, text) in shown.items() if text == winner}
    return best


def _decimals(value: float, digits: int) -> str:
    """``value`` >= 1 with so many digits, at most two of them after the point."""
    return f"{value:,.{max(0, min(2, digits - len(str(int(value)))))}f}"
