"""The data that the script of a page draws: rows of figures, the curves they make, networks and partitions.

Plain data for JSON. The script averages over seeds, as ``RunRecord.series`` does; a test compares the two.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from statistics import fmean
from typing import Any

from holdfast.experiments.record import RunRecord
from holdfast.experiments.record_files import DELAY_COLUMNS, SOLVER_COLUMNS, RecordedRow, WeightedLink
from holdfast.report.format import OF_ONE_NODE, quantity, recorded_metrics
from holdfast.report.styles import COLOURS, DRAWN_UP_TO, curve_styles, node_places

# --- what the script of a page draws --------------------------------------------------------------------


AXES = ("round", "payload_bytes", "gradient_evaluations", "seconds", *DELAY_COLUMNS)
COSTS = (*DELAY_COLUMNS, *SOLVER_COLUMNS)  # recorded as metrics are, but not drawn by themselves
LINKS_UP_TO = 5000  # more would be a blot, and slow


def curves_data(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Everything about the curves but their numbers: ``records`` as ``overlaid`` gives them."""
    recorded = recorded_metrics(records)
    metrics = [metric for metric in recorded if metric not in COSTS]
    axes = [axis for axis in AXES if axis not in DELAY_COLUMNS or axis in recorded]
    return {
        "metrics": [_described(metric) for metric in metrics],
        "axes": [_described(axis) for axis in axes],
        "columns": columns(records),
        "curves": list(_curves(records)),
        "node_figures": list(_node_figures(records)),
    }


def columns(records: Sequence[RunRecord]) -> list[str]:
    """The names of the numbers in a row, after that of its job."""
    recorded = recorded_metrics(records)
    axes = [axis for axis in AXES if axis not in DELAY_COLUMNS or axis in recorded]
    return list(dict.fromkeys([*axes, *recorded]))


def rows_data(records: Sequence[RunRecord], most: int | None = None) -> list[list[float | None]]:
    """The rows of all jobs that count, null where a figure is not finite.

    Jobs are numbered through all records.
    Of jobs with more than ``most`` rows, only every other, third ... row is taken, and the last.
    """
    names = columns(records)
    found = []
    first = 0
    for record in records:
        every = thinning(record, most)
        for place, rows in enumerate(record.counted_rows):
            for order, row in enumerate(rows.values()):
                if order % every == 0 or order == len(rows) - 1:
                    found.append(row_data(first + place, row, names))
        first += len(record.counted_rows)
    return found


def row_data(job: int, row: RecordedRow, names: Sequence[str]) -> list[float | None]:
    """The number of its job, then the figures called ``names``."""
    return [job, *(_brief(row.get(name)) for name in names)]


def thinning(record: RunRecord, most: int | None) -> int:
    """Take every k-th row, k: the same for all jobs, as seeds are averaged round by round."""
    longest = max(map(len, record.counted_rows), default=0)
    return 1 if most is None else max(1, math.ceil(longest / most))


def setting_data(record: RunRecord) -> dict[str, Any] | None:
    """The network and which node owns which data; None for a member of a federation, which does not know."""
    if record.partition is None:
        return None
    partition = record.partition
    names = partition.names or [str(node) for node in range(len(partition.samples))]
    return network_data(names, record.links, is_server=not record.links) | {
        "title": record.prefix,
        "samples": partition.samples.tolist(),
        "classes": partition.classes,
        "counts": partition.counts.tolist() if partition.classes else [],
    }


def network_data(names: Sequence[str], links: Sequence[WeightedLink], *, is_server: bool) -> dict[str, Any]:
    """A network to draw; where nodes are too many, they have no places."""
    drawn = len(names) <= DRAWN_UP_TO
    places = node_places(len(names), links, is_server=is_server).round(4).tolist() if drawn else []
    return {
        "names": list(names),
        "places": places,
        "server": is_server,
        "links": [[i, j, _brief(w)] for i, j, w in links] if drawn and len(links) <= LINKS_UP_TO else [],
        "link_count": len(links),
    }


def _described(column: str) -> dict[str, Any]:
    known = quantity(column)
    return {
        "name": column,
        "title": known.title,
        "kind": known.kind,
        "decades": known.decades,
        "reading": known.reading,
    }


def _curves(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    styles = curve_styles(records)
    groups = [(record, group) for record in records for group in record.groups]
    methods = [group.jobs[0]["algorithm"] for _, group in groups]
    shared = len(groups) > len(COLOURS)
    first = {
        id(record): sum(len(r.summary["jobs"]) for r in records[:at]) for at, record in enumerate(records)
    }
    for at, (record, group) in enumerate(groups):
        style, alike = styles[group.label], methods.count(methods[at])
        yield {
            "label": group.label,
            "method": methods[at],
            "jobs": [first[id(record)] + place for place in group.counted],
            "colour": COLOURS.index(style.colour),
            "shade": methods[:at].count(methods[at]) / (alike - 1) if shared and alike > 1 else 0.5,
            "dash": style.dash[1],
            "width": style.width,
            "diverged": group.status == "diverged",
            "note": group.note,
        }


def _node_figures(records: Sequence[RunRecord]) -> Iterator[dict[str, Any]]:
    """What was measured of each node, at the last round that all seeds reached: the mean over seeds."""
    for order, record in enumerate(records):
        by_figure: dict[str, list[str]] = {}
        for metric in record.metrics:
            if match := re.search(OF_ONE_NODE, metric):
                by_figure.setdefault(metric[: match.start()], []).append(metric)
        for figure, names in by_figure.items():
            kind = "accuracy" if figure.endswith("accuracy") else "number"
            for group in record.groups:
                if group.rounds:
                    seeds = [group.values(name, group.rounds[-1]) for name in names]
                    values = [_brief(fmean(found)) if found else None for found in seeds]
                    if all(value is None for value in values):
                        continue
                    yield {
                        "record": order,
                        "title": f"{figure.replace('_', ' ')} with {group.label}",
                        "kind": kind,
                        "values": values,
                    }


def _brief(value: object) -> float | int | None:
    """Six digits are more than a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if isinstance(value, int) else None


# --- the page that the report and the live view share ---------------------------------------------------
#
# Its security policy lets this very script run and nothing else, and nothing be fetched but a live page's
# data.


CSS = files("holdfast.report").joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files("holdfast.report").joinpath("page.js").read_text(encoding="utf-8")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()


def policy(*, live: bool) -> str:
    """The content security policy; styles may stand in the page, as the pictures' own do."""
    fetched = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {fetched}; base-uri 'none'; form-action 'none'"
    )


def page_html(title: str, body: str, data: dict[str, Any], *, live: bool = False) -> str:
    """A whole page: ``body`` is markup with everything from outside escaped, ``data`` goes to the script."""
    icon = '\n<link rel="icon" href="data:,">' if live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy(live=live)}">
<title>{escape(title)}</title>{icon}
<style>{CSS}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{json_in_html(data)}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def json_in_html(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
