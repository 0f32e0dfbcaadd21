"""What a tuning found: the metric against the hyperparameter, and the best values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table
from rich.text import Text

from holdfast.experiments.record import Group, RunRecord
from holdfast.experiments.tuning import Goal, Trial, Tuned
from holdfast.report.figures import FAINT, GRID, add_legend, legend_columns, quiet
from holdfast.report.format import metric_title, quantity, spread_text
from holdfast.report.styles import COLOURS, curve_style
from holdfast.report.verdict import leading_metric

# --- what a tuning found: the metric against the hyperparameter, and the best values --------------------


LOST = "diverged or failed"


def tuning_figure(tuned: Tuned) -> Figure:
    """The metric at the last round against the values tried: means over the seeds ± standard deviation.

    A star marks the best value of each algorithm; crosses at the foot are values that diverged or failed.
    """
    goal = tuned.goal
    columns = legend_columns([*(_label(tuned, name) for name in tuned.algorithms), LOST])
    figure = Figure(
        figsize=(6.4, 3.6 + 0.2 * math.ceil((len(tuned.algorithms) + 1) / columns)), layout="constrained"
    )
    axes = figure.add_subplot()
    percent = 100.0 if quantity(goal.metric).kind == "accuracy" else 1.0
    means = [trial.score.mean for trial in tuned.trials if trial.score is not None]
    axes.set_xscale("log")
    if quantity(goal.metric).decades and means and min(means) > 0 and max(means) > 10 * min(means):
        axes.set_yscale("log")
    for order, name in enumerate(tuned.algorithms):
        _draw(axes, tuned, name, order, percent)
    axes.set_xlabel(goal.parameter)
    axes.set_ylabel(quantity(goal.metric).title + (" (%)" if percent == 100 else ""))
    _mark_values(axes, tuned.trials)
    if any(trial.score is None for trial in tuned.trials):
        axes.plot([], [], "x", color=FAINT, markersize=8, markeredgewidth=2, label=LOST)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    quiet(axes)
    add_legend(figure, columns)
    return figure


def _draw(axes: Axes, tuned: Tuned, name: str, order: int, percent: float) -> None:
    style = curve_style(order, order, order)
    scored = [trial for trial in tuned.of(name) if trial.score is not None]
    lost = [trial.value for trial in tuned.of(name) if trial.score is None]
    x, y = [trial.value for trial in scored], [percent * _score(trial) for trial in scored]
    axes.plot(
        x,
        y,
        label=_label(tuned, name),
        color=style.colour,
        linestyle=style.dash,
        linewidth=min(style.width, 2.0),
        marker=style.marker,
        markersize=6,
        markeredgecolor="white",
    )
    spread = [percent * (trial.score.std or 0.0) for trial in scored if trial.score is not None]
    axes.errorbar(x, y, yerr=spread, fmt="none", ecolor=style.colour, capsize=3, elinewidth=1.2)
    if lost:
        axes.plot(
            lost,
            [0.03 + 0.04 * order] * len(lost),
            transform=axes.get_xaxis_transform(),
            color=style.colour,
            marker="x",
            markersize=8,
            markeredgewidth=2,
            linestyle="",
        )
    if (best := tuned.best(name)) is not None:
        axes.plot(
            best.value,
            percent * _score(best),
            marker="*",
            markersize=17,
            color=style.colour,
            markeredgecolor="white",
            zorder=4,
        )


def _mark_values(axes: Axes, trials: Sequence[Trial]) -> None:
    """The values that were tried as ticks, where they are far enough apart to be read."""
    values = sorted({trial.value for trial in trials})
    span = math.log(values[-1] / values[0])
    margin = math.exp(0.06 * span)
    axes.set_xlim(values[0] / margin, values[-1] * margin)
    steps = [math.log(right / left) / span for left, right in pairwise(values)]
    if min(steps) > 0.09:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()


def _score(trial: Trial) -> float:
    assert trial.score is not None
    return trial.score.mean


def _label(tuned: Tuned, name: str) -> str:
    best = tuned.best(name)
    return f"{name}: " + (f"best {tuned.goal.parameter} {best.value:g}" if best else "nothing converged")


def tuning_table(tuned: Tuned) -> Table:
    """One line per value; the best of each algorithm is bold and starred."""
    metric = tuned.goal.metric
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, caption_justify="left")
    table.add_column("algorithm")
    table.add_column(tuned.goal.parameter, justify="right")
    table.add_column(metric_title(metric), justify="right")
    table.add_column("")
    for name in tuned.algorithms:
        best = tuned.best(name)
        for trial in tuned.of(name):
            score = spread_text(metric, trial.score) if trial.score is not None else "–"
            style = "bold" if trial is best else "red" if trial.score is None else ""
            note = "best" if trial is best else trial.note
            table.add_row(Text(name), f"{trial.value:g}", score, Text(note), style=style)
    caveats = Text("\n".join(tuned.caveats), style="not italic yellow")
    table.caption = caveats if tuned.caveats else None
    return table


# --- sweeps over a hyperparameter: the final metric against its values, as for a tuning -----------------


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
                label = _axes_label(record, group, axis, together=together)
                trials[together].append(Trial(label, value, score, row.note))
    places = [(trial.algorithm, trial.value) for trial in trials[True]]
    return trials[len(set(places)) == len(places)]


def _axes_label(record: RunRecord, group: Group, axis: str, *, together: bool) -> str:
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
