"""Draws the figure of an experiment as its paper lays it out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, LogFormatterSciNotation, LogLocator, ScalarFormatter

from holdfast.experiments.record import Series
from holdfast.experiments.record_files import COST_COLUMNS
from holdfast.report.figures import add_legend, draw_curves, legend_columns
from holdfast.report.styles import Style, curve_style
from holdfast_papers.base import Layout, Line, Panel
from holdfast_papers.evidence import Evidence, MissingRunError, fitted_power

PANEL_WIDTH, PANEL_HEIGHT = 4.4, 3.2  # inches
FEW = 8  # values on a logarithmic axis that are all written out
CHARACTERS = 14  # of a legend that fit into an inch
SYMBOLS = {"local_steps": "K", "lr": "step", "start": "first step", "rho": "ρ"}  # of swept keys in a legend


def draw(layout: Layout, evidence: Evidence) -> Figure:
    """All panels; a line of the same name looks the same in all of them."""
    columns = min(layout.columns, len(layout.panels))
    rows = math.ceil(len(layout.panels) / columns)
    panels = [_expanded(panel, evidence) for panel in layout.panels]
    styles = _styles(layout.panels, panels)
    in_legend = legend_columns(list(styles), width=int(columns * PANEL_WIDTH * CHARACTERS))
    height = rows * PANEL_HEIGHT + 0.2 * math.ceil(len(styles) / in_legend)
    figure = Figure(figsize=(max(columns * PANEL_WIDTH, 6.4), height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, evidence, styles)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    add_legend(figure, in_legend)
    return figure


def _expanded(panel: Panel, evidence: Evidence) -> Panel:
    """The panel with every line once for each value of its key ``each``, if it has one."""
    if not panel.each:
        return panel
    lines = [
        line._replace(
            name=f"{line.name}, {SYMBOLS.get(panel.each, panel.each)} = {_tick(value)}",
            where={**line.where, panel.each: value},
        )
        for line in panel.lines
        for value in evidence.swept(panel.each, line.preset)
    ]
    return replace(panel, lines=lines)


def _styles(before: Sequence[Panel], after: Sequence[Panel]) -> dict[str, Style]:
    """A style for every name in the legend.

    Lines that one of several in a panel was expanded into share its colour; those of a single one have the
    next that are free.
    """
    styles: dict[str, Style] = {}
    origins = list(dict.fromkeys(line.name for panel in before for line in panel.lines))
    for original, panel in zip(before, after, strict=True):
        copies = len(panel.lines) // len(original.lines)
        for place, line in enumerate(panel.lines):
            origin = origins.index(original.lines[place // copies].name)
            dash = place % copies if copies > 1 else origin
            colour = origin if copies == 1 or len(original.lines) > 1 else len(styles)
            styles.setdefault(line.name, curve_style(colour, dash, colour))
    return styles


def _draw_panel(axes: Axes, panel: Panel, evidence: Evidence, styles: dict[str, Style]) -> None:
    curves = [(_series(panel, line, evidence), styles[line.name]) for line in panel.lines]
    draw_curves(axes, [(curve, style) for curve, style in curves if curve.x], panel.y, panel.x)
    axes.set_title(panel.title, fontsize=10, loc="left")
    if _is_swept(panel, panel.lines[0], evidence):
        ticks = evidence.swept(panel.x, panel.lines[0].preset)
        axes.set_xticks(range(len(ticks)), [_tick(text) for text in ticks])
    if panel.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(LogFormatterSciNotation())
        places = sorted({x for curve, _ in curves for x in curve.x})
        if len(places) <= FEW:
            axes.set_xticks(places, [f"{x:g}" for x in places])
            axes.minorticks_off()
    elif panel.by:
        axes.xaxis.set_major_locator(AutoLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.log_y and axes.get_yscale() != "log":
        axes.set_yscale("log")
        axes.relim()
        axes.autoscale(axis="y")
    if panel.common_x:
        end = min((curve.x[-1] for curve, _ in curves if curve.x), default=1.0)
        axes.set_xlim(-0.03 * end, end)
    if panel.x_label:
        axes.set_xlabel(panel.x_label)
    if panel.y_label:
        axes.set_ylabel(panel.y_label)


def _series(panel: Panel, line: Line, evidence: Evidence) -> Series:
    """The points of a line: recorded, along a swept key, or of the computed table."""
    if panel.by:
        return _computed(panel, line, evidence)
    if _is_swept(panel, line, evidence):
        return _along_sweep(panel, line, evidence)
    record = evidence.run(line.preset)
    try:
        group = evidence.curve(line.algorithm, line.preset, **line.where).group
    except MissingRunError:
        return _summarised(line.name, {})
    return replace(record.series(panel.y, panel.x)[record.groups.index(group)], label=line.name)


def _is_swept(panel: Panel, line: Line, evidence: Evidence) -> bool:
    if panel.by:
        return False
    record = evidence.run(line.preset)
    return panel.x not in ("round", *record.metrics, *COST_COLUMNS)


def _along_sweep(panel: Panel, line: Line, evidence: Evidence) -> Series:
    """Each point of the sweep at its place, evenly spaced: its values may be words or infinite.

    There is none where the method diverged or failed.
    """
    points = {}
    for place, value in enumerate(evidence.swept(panel.x, line.preset)):
        try:
            curve = evidence.curve(line.algorithm, line.preset, **{**line.where, panel.x: value})
        except MissingRunError:
            continue
        if not curve.broke_off:
            points[place] = curve.best(panel.y) if panel.best else curve.final(panel.y)
    return _summarised(line.name, points)


def _computed(panel: Panel, line: Line, evidence: Evidence) -> Series:
    points: dict[float, list[float]] = {}
    for row in evidence.rows:
        if row[panel.by] == line.algorithm and row.get(panel.y) is not None:
            points.setdefault(float(row[panel.x]), []).append(float(row[panel.y]))
    series = _summarised(line.name, {x: np.array(points[x]) for x in sorted(points)})
    if panel.slope:
        series = replace(series, label=f"{line.name}: slope {_slope(points):.2f}")
    return series


def _slope(points: dict[float, list[float]]) -> float:
    """Of the line that fits all points best in the logarithms."""
    x, y = zip(*((x, y) for x, values in points.items() for y in values), strict=True)
    return fitted_power(x, y)


def _summarised(name: str, points: dict[float, np.ndarray] | dict[int, np.ndarray]) -> Series:
    values = list(points.values())
    return Series(
        label=name,
        x=[float(x) for x in points],
        mean=[fmean(seeds) for seeds in values],
        low=[float(min(seeds)) for seeds in values],
        high=[float(max(seeds)) for seeds in values],
        seeds=max((len(seeds) for seeds in values), default=1),
    )


def _tick(text: str) -> str:
    return {"inf": "∞"}.get(text, text)
