"""``holdfast list runs``: the run directories of a folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RunRecord, load_record
from holdfast.experiments.record_files import status_counts
from holdfast.report.format import best_lines, format_value
from holdfast.report.terminal import as_data

SHOWN = ("test_accuracy", "average_accuracy", "train_loss", "minibatch_loss")  # the first that was recorded

OTHERS = 45  # characters beside the path; a terminal that is narrower breaks the lines itself


def list_runs(folder: Path, *, as_json: bool) -> None:
    """Prints every run under ``folder``, the newest last."""
    if not folder.is_dir():
        raise HoldfastError(f"{folder} is not a folder: give the folder of your runs with --runs-dir")
    records = list(_found(folder))
    if as_json:
        print(json.dumps([entry for record in records for entry in as_data([record])], indent=2))
        return
    console = Console()
    if not records:
        console.print(f"no runs in {folder}")
        return
    paths = [str(record.path) for record in records]
    table = Table(box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, min_width=max(map(len, paths)))  # to be copied
    table.add_column("begun", no_wrap=True)
    for head in ("jobs", "best"):
        table.add_column(head, overflow="fold")
    for path, record in zip(paths, records, strict=True):
        began = datetime.fromtimestamp((record.path / "environment.json").stat().st_mtime)
        counted = status_counts(record.summary["jobs"]).removeprefix("of ")
        table.add_row(path, f"{began:%Y-%m-%d %H:%M}", counted, _best(record))
    console.width = max(console.width, max(map(len, paths)) + OTHERS)
    console.print(table)


def _found(folder: Path) -> Iterator[RunRecord]:
    """Runs, and those of tunings, by the time at which they began; a line on each that cannot be read."""
    summaries = [
        path
        for pattern in ("*/summary.json", "*/grid-*/summary.json")
        for path in folder.glob(pattern)
        if (path.parent / "environment.json").exists()
    ]
    for path in sorted(summaries, key=lambda path: (path.parent / "environment.json").stat().st_mtime):
        try:
            yield load_record(path.parent)
        except HoldfastError as error:
            print(f"warning: left out: {error}", file=sys.stderr)


def _best(record: RunRecord) -> str:
    """The line with the best figure, such as ``local-gecl: accuracy 95.2 %``."""
    rows = record.final_table()
    for metric in SHOWN:
        recorded = [row for row in rows if metric in row.values]
        if recorded:
            best = best_lines(recorded, metric)
            row = next(row for index, row in enumerate(recorded) if index in best) if best else recorded[0]
            return f"{row.label}: {metric} {format_value(metric, row.values[metric].mean)}"
    return ""
