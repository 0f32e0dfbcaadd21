"""The table of results of the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.report.figures import curve_styles
from holdfast.report.format import best_lines, quantity, round_text, spread_text
from holdfast.report.plots import recorded_metrics
from holdfast.runs.record import FinalRow, RunRecord


def results_table(records: Sequence[RunRecord]) -> str:
    """One line per algorithm and swept value, best figures bold, and a note on how to read them."""
    rows = [row for record in records for row in record.final_table()]
    columns = [*recorded_metrics(records), "payload_bytes", "gradient_evaluations", "seconds"]
    columns = [column for column in columns if any(column in row.values for row in rows)]
    with_notes = any(row.note for row in rows)
    heads = ["algorithm", "seeds", "round", *(_head(column) for column in columns)]
    if with_best := "test_accuracy" in columns:
        heads.append("best round (%)")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    if with_notes:
        head += '<th scope="col" class="words">status</th>'
    best = {column: best_lines(rows, column) for column in columns}
    styles = curve_styles(records)
    lines = []
    for line, row in enumerate(rows):
        cells = [f"<td>{row.seeds}</td>", f"<td>{round_text(row)}</td>"]
        cells += [_cell(row, column, line in best[column]) for column in columns]
        if with_best:
            accuracy = row.best_accuracy
            cells.append(f"<td>{spread_text('test_accuracy', accuracy) if accuracy else '–'}</td>")
        if with_notes:
            cells.append(f'<td class="words">{escape(row.note or "done")}</td>')
        swatch = f'<span class="swatch" style="background:{styles[row.label].colour}"></span>'
        look = "" if row.status == "done" else ' class="out"'
        lines.append(f'<tr{look}><th scope="row">{swatch}{escape(row.label)}</th>{"".join(cells)}</tr>')
    return f"""<div class="wide"><table class="results">
<thead><tr>{head}</tr></thead>
<tbody>
{chr(10).join(lines)}
</tbody>
</table></div>
<p class="note">{escape(_note(rows, with_best))}</p>"""


def _cell(row: FinalRow, column: str, best: bool) -> str:
    text = spread_text(column, row.values[column]) if column in row.values else "–"
    return f'<td class="best">{escape(text)}</td>' if best else f"<td>{escape(text)}</td>"


def _head(column: str) -> str:
    return quantity(column).short + (" (%)" if quantity(column).kind == "accuracy" else "")


def _note(rows: Sequence[FinalRow], with_best: bool) -> str:
    words = ["Figures of the last recorded round; the best of each column is bold."]
    if any(row.seeds > 1 for row in rows):
        words.append(
            "Mean ± sample standard deviation over seeds, at the last round that all of them reached."
        )
    if with_best:
        words.append("Best round: the highest accuracy over all recorded rounds, for each seed.")
    if any(row.status == "diverged" for row in rows):
        words.append("Diverged: figures of the last round in which everything was finite.")
    words.append("Traffic and gradients: of all nodes together. Time: spent in rounds, without measuring.")
    return " ".join(words)
