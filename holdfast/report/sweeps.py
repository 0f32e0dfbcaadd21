"""Sweeps over a hyperparameter: the final metric against its values, as for a tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.experiments.groups import Group
from holdfast.experiments.record import RunRecord
from holdfast.experiments.tuning import Goal, Trial, Tuned
from holdfast.report.format import quantity
from holdfast.report.styles import COLOURS, curve_style
from holdfast.report.verdict import leading_metric

METHOD = "algorithm."


def swept(records: Sequence[RunRecord]) -> list[Tuned]:
    """One for every hyperparameter of the methods that was swept over positive numbers.

    A line is a method on one problem, with the other swept values as they are. The values of several runs,
    such as the grids of a tuning, are one line unless a value is there twice.
    """
    metric = leading_metric(records)
    if metric is None or not quantity(metric).better:
        return []
    axes = dict.fromkeys(axis for record in records for axis in record.axes if axis.startswith(METHOD))
    found = []
    for axis in axes:
        goal = Goal(
            axis.removeprefix(METHOD), metric, "max" if quantity(metric).better == "high" else "min", widen=0
        )
        trials = _trials(records, axis, goal)
        values: dict[str, set[float]] = {}
        for trial in trials:
            values.setdefault(trial.algorithm, set()).add(trial.value)
        trials = [trial for trial in trials if len(values[trial.algorithm]) > 1]
        if trials:
            found.append(Tuned(goal, trials, dict.fromkeys(values, 0)))
    return found


def _trials(records: Sequence[RunRecord], axis: str, goal: Goal) -> list[Trial]:
    trials: dict[bool, list[Trial]] = {True: [], False: []}
    for record in records:
        for group, row in zip(record.groups, record.final_table(), strict=True):
            value = _number(group.jobs[0]["axes"].get(axis))
            if value is None or row.status in ("pending", "unfinished", "interrupted"):
                continue
            score = row.defined(goal.metric) if row.status in ("done", "stopped") else None
            for together in (True, False):
                label = _label(record, group, axis, together=together)
                trials[together].append(Trial(label, value, score, row.note))
    places = [(trial.algorithm, trial.value) for trial in trials[True]]
    return trials[len(set(places)) == len(places)]


def _label(record: RunRecord, group: Group, axis: str, *, together: bool) -> str:
    """The method, its problem and its other swept values; and its run, unless all runs are shown together."""
    jobs_axes = group.jobs[0]["axes"]
    others = [f"{key.removeprefix(METHOD)}={value}" for key, value in jobs_axes.items() if key != axis]
    problem = [group.contest] if record.differing else []
    others = [text for text in others if not (record.differing and text.startswith("problem."))]
    name = group.jobs[0]["algorithm"] if together else group.algorithm
    return " ".join([name, *problem, *others])


def _number(text: Any) -> float | None:
    """A swept value that is a positive number."""
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if 0 < value < float("inf") else None


def sweep_data(tuned: Tuned) -> dict[str, Any]:
    """A sweep for the script of a page."""
    lines = []
    for order, name in enumerate(tuned.algorithms):
        best, style = tuned.best(name), curve_style(order, order, order)
        scored = [(trial.value, trial.score) for trial in tuned.of(name) if trial.score is not None]
        lines.append(
            {
                "label": name,
                "x": [value for value, _ in scored],
                "mean": [score.mean for _, score in scored],
                "std": [score.std or 0 for _, score in scored],
                "lost": [trial.value for trial in tuned.of(name) if trial.score is None],
                "best": None if best is None else best.value,
                "colour": COLOURS.index(style.colour),
                "shade": 0.5,
                "dash": style.dash[1],
                "width": style.width,
                "edge": best is not None and tuned.on_edge(name),
            }
        )
    shown = quantity(tuned.goal.metric)
    return {
        "parameter": tuned.goal.parameter,
        "title": shown.title,
        "kind": shown.kind,
        "decades": shown.decades,
        "lines": lines,
    }
