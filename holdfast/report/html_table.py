"""The table of results of the HTML report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from holdfast.experiments.columns import COST_COLUMNS
from holdfast.experiments.record import FinalRow, RunRecord, Spread
from holdfast.report.format import best_lines, metric_title, recorded_metrics, round_text, spread_text
from holdfast.report.styles import curve_styles
from holdfast.report.untested import untested

BEST, OUT = ' class="best"', ' class="out"'


def results_table(records: Sequence[RunRecord]) -> str:
    """One line per algorithm and swept value, best figures bold, and a note on how to read them."""
    rows = [row for record in records for row in record.final_table()]
    columns = [*recorded_metrics(records), "payload_bytes", "gradient_evaluations", "seconds"]
    columns = [column for column in columns if any(column in row.values for row in rows)]
    heads = ["algorithm", "seeds", "round"]
    for column in columns:
        heads.append(metric_title(column))
        if column == "test_accuracy":
            heads.append("best accuracy (%)")
    rivals = any(record.member is None for record in records)  # members of a federation do not compete
    best = {column: best_lines(rows, column) if rivals else set() for column in columns}
    styles = curve_styles(records)
    lines = []
    for line, row in enumerate(rows):
        swatch = f'<span class="swatch" style="background:{styles[row.label].variable}"></span>'
        note = f'<small class="note">{escape(row.note)}</small>' if row.note else ""
        cells = [f'<th scope="row">{swatch}{escape(row.label)}{note}</th>']
        cells += [f"<td>{row.seeds}</td>", f"<td>{round_text(row)}</td>"]
        for column in columns:
            cells.append(_cell(column, row.values.get(column), line in best[column]))
            if column == "test_accuracy":
                cells.append(_cell(column, row.best_accuracy, best=False))
        lines.append(f'<tr data-curve="{line}"{"" if row.status == "done" else OUT}>{"".join(cells)}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "\n".join(lines)
    return f"""<div class="wide"><table class="results" style="--columns:{len(heads)}">
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
<p class="note">{escape(_note(rows, any(record.member is not None for record in records), rivals))}</p>
{f'<p class="note">{escape(missing)}</p>' if (missing := untested(records)) else ""}"""


def _cell(column: str, spread: Spread | None, best: bool) -> str:
    """The mean, and small below it the deviation; costs hardly vary, so they show the mean alone."""
    if spread is None:
        return "<td>–</td>"
    mean, _, deviation = spread_text(column, spread).partition(" ± ")
    below = f"<small>± {escape(deviation)}</small>" if deviation and column not in COST_COLUMNS else ""
    return f"<td{BEST if best else ''}>{escape(mean)}{below}</td>"


def _note(rows: Sequence[FinalRow], deployed: bool, rivals: bool) -> str:
    words = ["Figures of the last recorded round; the best of each column is bold."]
    if not rivals:
        words = ["Figures of the last recorded round."]
    elif len({row.contest for row in rows}) > 1:
        words[0] = (
            "Figures of the last recorded round; the best of each column, for the same problem, is bold."
        )
    if any(row.seeds > 1 for row in rows):
        words.append(
            "Mean ± sample standard deviation over seeds, at the last round that all of them reached."
        )
    if any(math.isnan(spread.mean) for row in rows for spread in row.values.values()):
        words.append("nan: undefined in that round, for one seed at least.")
    if any(row.best_accuracy for row in rows):
        words.append("Best accuracy: the highest over all recorded rounds, for each seed.")
    if any(row.status == "diverged" for row in rows):
        words.append("Diverged: figures of the last round in which everything was finite.")
    if any(row.status == "failed" for row in rows):
        words.append("Failed: figures of the last round before the error.")
    words.append("Traffic and gradients: of all nodes together. Time: spent in rounds, without measuring.")
    if deployed:
        words.append("Of a deployed member: its own traffic, gradients and figures, and all of its time.")
    return " ".join(words)
