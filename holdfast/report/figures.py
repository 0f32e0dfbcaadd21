"""Curves as pictures, and what all pictures share.

Figures are made without pyplot, so nothing global changes. Import this module only where a picture is wanted.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from holdfast.core.errors import unknown
from holdfast.experiments.record import RunRecord, Series, overlaid
from holdfast.experiments.record_files import DELAY_COLUMNS
from holdfast.report.format import byte_unit, count_text, quantity
from holdfast.report.styles import Style, curve_style, curve_styles

AXES = ("round", "payload_bytes", "gradient_evaluations", *DELAY_COLUMNS)

INK, FAINT, GRID = "#24292f", "#6e7781", "#d8dee4"  # the HTML report swaps these in dark mode


def curves_figure(records: Sequence[RunRecord], metric: str, axis: str = "round") -> Figure:
    """``metric`` against rounds, bytes or gradients: one curve per line of the table of results."""
    if axis not in AXES:
        raise unknown("axis", axis, AXES)
    shown = overlaid(records)
    having = [record for record in shown if metric in record.metrics]
    if not having:
        recorded = sorted({name for record in shown for name in record.metrics})
        raise unknown("metric", metric, recorded)
    styles = curve_styles(shown)
    series = [curve for record in having for curve in record.series(metric, axis) if curve.x]
    return _draw_curves([(curve, styles[curve.label]) for curve in series], metric, axis)


def history_figure(rounds: Sequence[float], values: Sequence[float], metric: str) -> Figure:
    """One metric of one run against its rounds; where it is not finite, the legend says so."""
    finite = [(x, y) for x, y in zip(rounds, values, strict=True) if math.isfinite(y)]
    lost = [x for x, y in zip(rounds, values, strict=True) if not math.isfinite(y)]
    x, y = [x for x, _ in finite], [y for _, y in finite]
    curve = Series(f"not finite from round {lost[0]:g} on" if lost else "", x, y, y, y)
    return _draw_curves([(curve, curve_style(0, 0, 1))], metric, "round")


def save_figure(figure: Figure, stem: Path) -> str:
    """Writes ``stem``.png and ``stem``.svg; the latter's text."""
    svg = svg_text(figure)
    figure.savefig(f"{stem}.png", dpi=150, facecolor="white")
    Path(f"{stem}.svg").write_text(svg, encoding="utf-8")
    return svg


def svg_text(figure: Figure) -> str:
    """The figure as SVG, its text kept as text; the same figure always gives the same bytes."""
    if figure.get_layout_engine() is not None:  # lays the figure out once; else each format would do so again
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "holdfast"}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def _draw_curves(curves: Sequence[tuple[Series, Style]], metric: str, axis: str) -> Figure:
    columns = legend_columns([_legend_label(curve) for curve, _ in curves])
    figure = Figure(figsize=(6.4, 3.6 + 0.2 * math.ceil(len(curves) / columns)), layout="constrained")
    draw_curves(figure.add_subplot(), curves, metric, axis)
    if any(curve.label for curve, _ in curves):
        add_legend(figure, columns)
    return figure


def draw_curves(axes: Axes, curves: Sequence[tuple[Series, Style]], metric: str, axis: str) -> None:
    """Means with their bands, axes labelled in words; the legend is left to the figure."""
    in_percent = 100.0 if quantity(metric).kind == "accuracy" else 1.0
    x_unit, x_name = _x_unit(axis, [x for curve, _ in curves for x in curve.x])
    _set_range(axes, [curve for curve, _ in curves], metric, in_percent)
    for order, (curve, style) in enumerate(curves):
        x = np.array(curve.x) / x_unit
        mean, low, high = (_visible(axes, y, in_percent) for y in (curve.mean, curve.low, curve.high))
        step = max(1, len(x) // 6)
        axes.plot(
            x,
            mean,
            label=_legend_label(curve),
            color=style.colour,
            linestyle=style.dash,
            linewidth=style.width,
            marker=style.marker,
            markersize=6,
            markeredgecolor="white",
            markeredgewidth=0.8,
            markevery=(order * step // len(curves), step),  # in turn, so that no marker hides another
            solid_capstyle="round",
            zorder=2 + order / len(curves),
        )
        if curve.seeds > 1:
            axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0, zorder=1)
    axes.set_xlabel(x_name)
    if quantity(axis).kind == "count":
        axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count_text(value)))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    quiet(axes)


def add_legend(figure: Figure, columns: int) -> None:
    """Above everything, each label once."""
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    entries = {
        label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)
    }
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=4,
    )


def _set_range(axes: Axes, curves: Sequence[Series], metric: str, in_percent: float) -> None:
    """Scale and limits of the y axis: those of the curves that did not diverge, if there is any."""
    steady = [curve for curve in curves if not curve.diverged] or list(curves)
    x = np.array([x for curve in steady for x in (*curve.x, *curve.x)])
    y = np.array([y for curve in steady for y in (*curve.low, *curve.high)]) * in_percent
    title = quantity(metric).title + (" (%)" if quantity(metric).kind == "accuracy" else "")
    # All nodes start from one model, so the consensus error begins at zero or at a rounding error.
    settled = y[(x > 0) & (y > 0)]
    shown = y[y > 1e-3 * settled.min(initial=np.inf)]
    if quantity(metric).decades and len(shown) and y.min() >= 0 and shown.max() > 10 * shown.min():
        _log_scale(axes, shown.min(), shown.max())
        if len(shown) < len(y):
            title += ", zeros not shown" if np.any(y[x > 0] == 0) else ", start not shown"
    elif len(y):
        margin = 0.05 * (y.max() - y.min()) or 0.05 * abs(y.max()) or 1.0
        axes.set_ylim(y.min() - margin, y.max() + margin)
    axes.set_ylabel(title)


def _log_scale(axes: Axes, low: float, high: float) -> None:
    margin = (high / low) ** 0.05
    axes.set_yscale("log")
    axes.set_ylim(low / margin, high * margin)
    if high < 100 * low:  # too few powers of ten for labels
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def _visible(axes: Axes, values: Sequence[float], in_percent: float) -> np.ndarray:
    """The part of a curve to draw: on a logarithmic axis nothing below its lower end."""
    y = np.array(values) * in_percent
    return np.where(y < axes.get_ylim()[0], np.nan, y) if axes.get_yscale() == "log" else y


def _x_unit(axis: str, values: Sequence[float]) -> tuple[float, str]:
    """The divisor of x, and the label of the x axis."""
    if quantity(axis).kind != "bytes":
        return 1, quantity(axis).title
    size, name = byte_unit(max(values, default=0.0))
    return size, f"{quantity(axis).title} ({name})"


def _legend_label(curve: Series) -> str:
    return f"{curve.label} ({curve.note})" if curve.note else curve.label


def legend_columns(labels: Sequence[str], width: int = 90) -> int:
    """As many as fit side by side into ``width`` characters; a line sample takes ten of them."""
    for columns in range(min(4, len(labels)), 1, -1):
        parts = np.array_split(np.array(labels), columns)
        if sum(10 + max(map(len, part)) for part in parts) <= width:
            return columns
    return 1


def quiet(axes: Axes) -> None:
    """Ticks and labels in our ink, thin and short."""
    axes.tick_params(which="both", length=0, colors=INK, labelsize=9)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.spines[:].set_color(FAINT)
