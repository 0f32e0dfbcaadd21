"""A run in words: which method came out best, and what did not go as planned."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.experiments.record import FinalRow, RunRecord, overlaid
from holdfast.experiments.record_files import short, status_counts
from holdfast.report.format import quantity, spread_text

NAMED_AT_MOST = 5
SENTENCES_AT_MOST = 3
EVALUATION = ("evaluate_every", "metrics", "personalize", "dtype")  # keys of an experiment


def verdict(records: Sequence[RunRecord]) -> str:
    """The final accuracy (else the training loss, else the first metric) of each algorithm, in one sentence.

    Every problem gets a sentence of its own; of a swept algorithm the best setting is named.
    """
    rows = [row for record in overlaid(records) for row in record.final_table()]
    metric = leading_metric(records)
    if metric is None:
        return "No metric was recorded."
    contests = dict.fromkeys(row.contest for row in rows)
    sentences = [_sentence([row for row in rows if row.contest == contest], metric) for contest in contests]
    sentences = [sentence for sentence in sentences if sentence]
    if len(sentences) > SENTENCES_AT_MOST:
        more = len(sentences) - SENTENCES_AT_MOST
        sentences = [*sentences[:SENTENCES_AT_MOST], f"The table has {more} more."]
    if sentences:
        return " ".join(sentences)
    if any(metric in row.values and row.status == "done" for row in rows):
        return f"The {quantity(metric).title} is undefined."
    statuses = {row.status for row in rows}
    if statuses == {"diverged"} or statuses == {"failed"}:
        return f"Every algorithm {statuses.pop()}."
    if statuses == {"diverged", "failed"}:
        return "Every algorithm diverged or failed."
    return "Nothing was recorded yet."


def leading_metric(records: Sequence[RunRecord]) -> str | None:
    """The metric by which runs are judged: the accuracy, else the training loss, else the first metric."""
    metrics = [metric for record in records for metric in record.metrics]
    return next((name for name in ("test_accuracy", "train_loss", *metrics) if name in metrics), None)


def _sentence(rows: Sequence[FinalRow], metric: str) -> str:
    """The algorithms on one problem, best first; empty if none has a value."""
    ranked = sorted(
        (row for row in rows if row.defined(metric) and row.status not in ("diverged", "failed")),
        key=lambda row: row.values[metric].mean,
        reverse=quantity(metric).better == "high",
    )
    if not ranked:
        return ""
    best: dict[str, FinalRow] = {}
    for row in ranked:
        best.setdefault(row.algorithm, row)
    winner, *others = best.values()
    rounds = {row.round for row in best.values()}
    start = [f"with {winner.contest}"] if winner.contest else []
    start += [f"after {winner.round} rounds"] if len(rounds) == 1 else []
    when = {row.label: "" if len(rounds) == 1 else f" (round {row.round})" for row in best.values()}
    value = f"{_figure(winner, metric)} {quantity(metric).title}"
    claim = f"{_name(winner)} reaches {value}{when[winner.label]}"
    named = [f"{_name(row)} {_figure(row, metric)}{when[row.label]}" for row in others[:NAMED_AT_MOST]]
    if len(others) > NAMED_AT_MOST:
        named.append(f"{len(others) - NAMED_AT_MOST} more in the table")
    rest = f"; {', '.join(named)}" if named else ""
    best_of = " (the best setting of each algorithm)" if len(rows) > len(best) and winner.tuning else ""
    sentence = ", ".join([*start, claim]) + rest + best_of + "."
    return sentence[0].upper() + sentence[1:] if start else sentence


def _name(row: FinalRow) -> str:
    return f"{row.algorithm} {row.tuning}".rstrip()


def _figure(row: FinalRow, metric: str) -> str:
    """The final value with its unit, unbreakable."""
    unit = " %" if quantity(metric).kind == "accuracy" else ""
    return (spread_text(metric, row.values[metric]) + unit).replace(" ", "\N{NO-BREAK SPACE}")


def troubles(record: RunRecord) -> list[str]:
    """Warnings before the figures are trusted: a run cut short, divergences and failures."""
    found = []
    jobs = record.summary["jobs"]
    resume = f"'holdfast resume {record.path.resolve().name}'"
    if record.member is not None:
        resume = f"the same command at {record.member}"
    if record.origin is not None:
        resume = f"{record.origin} with this run_dir and resume=True"
    if record.summary["status"] != "complete":
        state = "was interrupted" if record.summary["status"] == "interrupted" else "did not end"
        found.append(f"{record.prefix}This run {state}: {status_counts(jobs)}; {resume} continues it.")
    elif any(job["status"] == "failed" for job in jobs):
        found.append(f"{record.prefix}Jobs failed: {status_counts(jobs)}; {resume} tries them again.")
    return found + job_troubles(record)


def differences(records: Sequence[RunRecord]) -> list[str]:
    """Why the lines of ``records``, shown together, do not simply compare: a warning for each reason."""
    shown = overlaid(records)
    found = []
    differing = []
    for key in shown[0].differing:
        values = [
            [record.problem_of(job).get(key, "–") for job in record.summary["jobs"]] for record in shown
        ]
        if _differ(values):
            differing.append(f"{key} is {_each(shown, values)}")
    if differing:
        found.append(
            "These runs are of different problems, and only lines of the same problem are ranked against "
            f"each other: {'; '.join(differing)}."
        )
    seeds = [[job["seed"] for job in record.summary["jobs"]] for record in shown]
    if _differ(seeds):
        found.append(f"These runs do not have the same seeds: {_each(shown, seeds)}.")
    rounds = [[job["rounds"] for job in record.summary["jobs"]] for record in shown]
    if _differ(rounds):
        found.append(f"These runs do not have the same number of rounds: {_each(shown, rounds)}.")
    differing = []
    for key in EVALUATION:
        values = [[short(record.config[key])] for record in shown if key in record.config]
        if len(values) == len(shown) and _differ(values):
            differing.append(f"{key} is {_each(shown, values)}")
    if differing:
        found.append(f"These runs are not evaluated alike: {'; '.join(differing)}.")
    return found


def _differ(values: Sequence[Sequence[object]]) -> bool:
    return len({frozenset(of_run) for of_run in values}) > 1


def _each(records: Sequence[RunRecord], values: Sequence[Sequence[object]]) -> str:
    """Such as ``digits in first, mnist in second``."""
    parts = zip(records, values, strict=True)
    return ", ".join(
        f"{' and '.join(map(str, dict.fromkeys(of_run)))} in {record.prefix.removesuffix(': ')}"
        for record, of_run in parts
    )


def job_troubles(record: RunRecord) -> list[str]:
    """A line for every job that diverged or failed: which one, and why."""
    found = []
    for group in record.groups:
        for job in group.jobs:
            if job["status"] in ("diverged", "failed"):
                seed = f" seed {job['seed']}" if len(group.jobs) > 1 else ""
                why = job.get("message") or f"at round {job['round']}"
                found.append(f"{group.label}{seed} {job['status']}: {why}")
    return found
