"""The table of results for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.report.format import best_lines, format_value, round_text, spread_text
from holdfast.runs.record import FinalRow, RunRecord, overlaid

HEADS = {  # two short lines over each column, so that the usual ones fit into 100 characters
    "test_accuracy": "accuracy\nmean %",
    "worst_accuracy": "worst\nnode %",
    "average_accuracy": "average\nmodel %",
    "train_loss": "train\nloss",
    "consensus": "consensus\nerror",
    "grad_norm2": "gradient\nnorm²",
    "stationarity": "station-\narity",
    "payload_bytes": "traffic",
    "gradient_evaluations": "gradients",
    "seconds": "time",
}


def summary_table(records: Sequence[RunRecord]) -> Table:
    """One line per algorithm and swept value at its last round, best figures bold; troubles below."""
    rows = [row for record in overlaid(records) for row in record.final_table()]
    columns = [column for column in HEADS if any(column in row.values for row in rows)]
    best = {column: best_lines(rows, column) for column in columns}
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, caption_justify="left")
    table.add_column("algorithm", vertical="bottom", overflow="fold")
    seeds = {row.seeds for row in rows}
    for head in (*["seeds"] * (len(seeds) > 1), "round", *(HEADS[column] for column in columns)):
        table.add_column(head, justify="right", vertical="bottom", overflow="fold")
    for line, row in enumerate(rows):
        cells = [_cell(row, column, line in best[column]) for column in columns]
        start = [Text(row.label), *[Text(str(row.seeds))] * (len(seeds) > 1), Text(round_text(row))]
        table.add_row(*start, *cells, style="" if row.status == "done" else "dim")
    table.caption = _caption(rows)
    return table


def _cell(row: FinalRow, column: str, best: bool) -> Text:
    if column not in row.values:
        return Text("–")
    spread = row.values[column]
    text = format_value(column, spread.mean)
    if column.endswith("accuracy"):
        text = spread_text(column, spread).replace(" ", "")
    return Text(text, style="bold" if best else "")


def _caption(rows: Sequence[FinalRow]) -> Text:
    caption = Text(style="not italic")
    most = max(row.seeds for row in rows)
    if most > 1:
        caption.append(f"Means over {most} seeds; accuracy ± its sample standard deviation.\n")
    for row in rows:
        if row.note:
            caption.append(
                f"{row.label}: {row.note}\n", style="red" if row.status == "diverged" else "yellow"
            )
    caption.rstrip()
    return caption
