"""A run in words: who came out best, and what did not go as planned."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.report.format import quantity, spread_text
from holdfast.runs.record import FinalRow, RunRecord, overlaid

NAMED_AT_MOST = 5


def verdict(records: Sequence[RunRecord]) -> str:
    """One sentence: the final accuracy (else the training loss, else the first metric) of each algorithm."""
    rows = [row for record in overlaid(records) for row in record.final_table()]
    metrics = [metric for record in records for metric in record.metrics]
    metric = next((name for name in ("test_accuracy", "train_loss", *metrics) if name in metrics), None)
    if metric is None:
        return "No metric was recorded."
    ranked = sorted(
        (row for row in rows if metric in row.values and row.status != "diverged"),
        key=lambda row: row.values[metric].mean,
        reverse=quantity(metric).better == "high",
    )
    if not ranked:
        return "Every algorithm diverged." if any(row.values for row in rows) else "Nothing was recorded yet."
    swept = any(record.axes for record in records)
    if swept:
        best: dict[str, FinalRow] = {}
        for row in ranked:
            best.setdefault(row.algorithm, row)
        ranked = list(best.values())
    one_round = len({row.round for row in ranked}) == 1
    first, *others = [_figure(row, metric, with_round=not one_round) for row in ranked]
    start = f"After {ranked[0].round} rounds, " if one_round else ""
    sentence = f"{start}{ranked[0].label} reaches {first[0]} {quantity(metric).title}{first[1]}"
    named = [f"{row.label} {value}{when}" for row, (value, when) in zip(ranked[1:], others, strict=True)]
    if len(named) > NAMED_AT_MOST:
        named = [*named[:NAMED_AT_MOST], f"{len(named) - NAMED_AT_MOST} more in the table"]
    best_of = " (the best setting of each algorithm)" if swept and len(rows) > len(ranked) else ""
    return "; ".join([sentence, ", ".join(named)] if named else [sentence]) + best_of + "."


def troubles(record: RunRecord) -> list[str]:
    """What a reader must know before trusting the figures: a run cut short, and every divergence."""
    found = []
    jobs = record.summary["jobs"]
    if record.summary["status"] != "complete":
        done = sum(job["status"] in ("done", "diverged") for job in jobs)
        state = "was interrupted" if record.summary["status"] == "interrupted" else "did not end"
        go_on = f"'holdfast resume {record.path.resolve().name}' continues it"
        found.append(f"{record.prefix}This run {state}: {done} of {len(jobs)} jobs are finished; {go_on}.")
    for group in record.groups:
        for job in group.jobs:
            if job["status"] == "diverged":
                message = job.get("message") or f"diverged at round {job['round']}"
                found.append(f"{group.label}, seed {job['seed']}: {message}")
    return found


def _figure(row: FinalRow, metric: str, with_round: bool) -> tuple[str, str]:
    """The final value with its unit, unbreakable, and the round where that differs between rows."""
    unit = " %" if quantity(metric).kind == "accuracy" else ""
    value = (spread_text(metric, row.values[metric]) + unit).replace(" ", "\N{NO-BREAK SPACE}")
    return value, f" (round {row.round})" if with_round else ""
