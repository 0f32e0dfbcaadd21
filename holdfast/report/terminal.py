"""The table of results for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from holdfast.experiments.record import FinalRow, RunRecord, Spread, overlaid
from holdfast.report.format import best_lines, format_value, metric_title, round_text, spread_text
from holdfast.report.sections import untested

# --- the table of results for the terminal --------------------------------------------------------------


DIGITS = 3
HEADS = {  # two short lines over each column, so that the usual ones fit into 80 characters
    "test_accuracy": "accuracy\nmean %",
    "worst_accuracy": "worst\nnode %",
    "average_accuracy": "average\nmodel %",
    "average_loss": "test\nloss",
    "train_loss": "train\nloss",
    "minibatch_loss": "batch\nloss",
    "consensus": "consen-\nsus",
    "grad_norm2": "gradient\nnorm²",
    "stationarity": "station-\narity",
    "rel_energy": "energy\nerror",
    "optimum_distance": "dist. to\noptimum",
    "dual_error": "dual\nerror",
    "tau_total": "delay",
    "unfinished_solves": "unfin-\nished",
    "payload_bytes": "traffic",
    "gradient_evaluations": "gradi-\nents",
    "seconds": "time",
}
# Left out in this order, and said so, where the terminal is too narrow for all.
EXPENDABLE = (
    "unfinished_solves",
    "dual_error",
    "average_loss",
    "gradient_evaluations",
    "average_accuracy",
    "seconds",
    "stationarity",
    "worst_accuracy",
    "consensus",
)


def summary_table(records: Sequence[RunRecord], width: int = 100) -> Table:
    """One line per algorithm and swept value at its last round, for a terminal of ``width`` characters.

    The best figures are bold; failures are listed below.
    """
    rows = [row for record in overlaid(records) for row in record.final_table()]
    columns = [column for column in HEADS if any(column in row.values for row in rows)]
    left_out: list[str] = []
    table = _table(rows, columns)
    for column in EXPENDABLE:
        if _natural_width(table) <= width:
            break
        if column in columns:
            columns.remove(column)
            left_out.append(metric_title(column))
            table = _table(rows, columns)
    table.caption = _caption(rows, columns, left_out, untested(records))
    return table


def _table(rows: Sequence[FinalRow], columns: Sequence[str]) -> Table:
    several = len({row.seeds for row in rows}) > 1
    best = {column: best_lines(rows, column, DIGITS) for column in columns}
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, caption_justify="left")
    table.add_column("algorithm", vertical="bottom", overflow="fold")
    for head in (*["seeds"] * several, "round", *(HEADS[column] for column in columns)):
        table.add_column(head, justify="right", vertical="bottom", overflow="fold")
    for line, row in enumerate(rows):
        start = [Text(row.label), *[Text(str(row.seeds))] * several, Text(round_text(row))]
        cells = [_cell(row, column, line in best[column]) for column in columns]
        table.add_row(*start, *cells, style="" if row.status == "done" else "dim")
    return table


def _cell(row: FinalRow, column: str, best: bool) -> Text:
    if column not in row.values:
        return Text("–")
    spread = row.values[column]
    text = format_value(column, spread.mean, DIGITS)
    if column.endswith("accuracy"):
        text = spread_text(column, spread).replace(" ", "")
    return Text(text, style="bold" if best else "")


def _caption(rows: Sequence[FinalRow], columns: Sequence[str], left_out: Sequence[str], missing: str) -> Text:
    caption = Text(style="not italic")
    if any(row.seeds > 1 for row in rows):
        number = {row.seeds for row in rows}
        seeds = f"{number.pop()} seeds" if len(number) == 1 else "the seeds"
        caption.append(f"Means over {seeds}; accuracy ± its sample standard deviation.\n")
    if any(math.isnan(row.values[column].mean) for row in rows for column in columns if column in row.values):
        caption.append("nan: undefined in that round, for one seed at least.\n")
    if left_out:
        caption.append(f"Not shown for lack of width, but in the report: {', '.join(left_out)}.\n")
    if missing:
        caption.append(f"{missing}\n", style="yellow")
    for row in rows:
        if row.note:
            caption.append(
                f"{row.label}: {row.note}\n",
                style="red" if row.status in ("diverged", "failed") else "yellow",
            )
    caption.rstrip()
    return caption


def _natural_width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def plain_text(table: Table, width: int) -> str:
    """A table as text of at most ``width`` characters a line, without colours."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as text:
        console.print(table)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


# --- the figures of runs as plain data, for programs: what ``--json`` prints ----------------------------


def as_data(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One entry per run: its folder, its status, and one line per algorithm and swept value."""
    return [
        {
            "run": str(record.path),
            "name": record.name,
            "status": record.summary["status"],
            "results": [_line(row) for row in record.final_table()],
        }
        for record in overlaid(records)
    ]


def _line(row: FinalRow) -> dict[str, Any]:
    return {
        "label": row.label,
        "algorithm": row.algorithm,
        "status": row.status,
        "note": row.note,
        "round": row.round,
        "rounds": row.rounds,
        "seeds": row.seeds,
        "figures": {name: _figure(spread) for name, spread in row.values.items()},
    }


def _figure(spread: Spread) -> dict[str, float | None]:
    """Mean and standard deviation over seeds; JSON knows no infinities."""
    std = spread.std
    return {
        "mean": spread.mean if math.isfinite(spread.mean) else None,
        "std": std if std is not None and math.isfinite(std) else None,
    }
