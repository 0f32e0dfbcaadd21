"""Runs under way, read again and again: what is new since the last time, cheaply and without disturbing them.

Only files are read. So this works for a run of another process, for one that is resumed, and for one that
ended long ago.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RECORD_FILES, RunRecord, overlaid, read_record
from holdfast.experiments.record_files import (
    ENDED,
    JobSummary,
    Summary,
    metrics_in,
    read_summary,
    status_counts,
)
from holdfast.report.format import seconds_text
from holdfast.report.page_data import columns, curves_data, row_data

LOG_LINES = 500
LogLine = tuple[str, str, str]  # time, level, text

BEGAN = {"running": "began", "interrupted": "was interrupted", "pending": "waits"}


class Followed:
    """One run directory, as far as it was read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = read_record(folder)
        self.text = b""  # of metrics.csv
        self.stamps: list[tuple[int, int, int]] = []
        self.restarts = 0  # how often rows that had been read were gone or different
        self.refresh()

    def refresh(self) -> bool:
        """Reads what is new; whether anything is."""
        stamps = [_stamp(self.folder / name) for name in RECORD_FILES]
        if stamps == self.stamps:
            return False
        summary = read_summary(self.folder / "summary.json")  # first: it never knows more than the rows do
        file = self.folder / "metrics.csv"
        content = file.read_bytes()
        text = content[: content.rfind(b"\n") + 1]
        goes_on = bool(self.text) and text.startswith(self.text)
        fresh = text[: text.find(b"\n") + 1] + text[len(self.text) :] if goes_on else text
        metrics = metrics_in(file, fresh.decode(errors="replace"))
        self.restarts += bool(self.text) and not goes_on
        rows = [*self.record.rows, *metrics.rows] if goes_on else metrics.rows
        self.record = replace(
            self.record, summary=summary, axes=metrics.axes, metrics=metrics.names, rows=rows
        )
        self.text, self.stamps = text, stamps
        return True

    @property
    def age(self) -> float:
        """Seconds since the last row."""
        return max(0.0, time.time() - self.stamps[-1][0] / 1e9)


def _stamp(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


class Following:
    """Some run directories together, and how much of them each reader has seen.

    ``find`` says which there are; more may come. ``hidden`` metrics are left out. Readers hold ``lock``, as
    requests come in several threads.
    """

    def __init__(
        self, find: Callable[[], Sequence[Path]], hidden: Callable[[str], bool] = lambda metric: False
    ) -> None:
        self.find, self.hidden = find, hidden
        self.runs: dict[Path, Followed] = {}
        self.shown: list[RunRecord] = []
        self.log: list[LogLine] = []
        self.trouble = ""  # why no more can be read, if so
        self.version = 0  # of everything that readers see
        self.lock = Lock()
        # Rows are appended only within an epoch. The first is the time: no other process has the same.
        self._epoch = int(time.time()) % 10**9
        self._shape: object = None
        self._names: list[str] = []
        self._rows: list[list[float | None]] = []
        self._taken: Counter[int] = Counter()
        self._statuses: dict[tuple[Path, int], str] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Reads what is new in all of them; whether anything is. What cannot be read now is tried again."""
        changed, trouble = False, ""
        for folder in self.find():
            try:
                if folder in self.runs:
                    changed |= self.runs[folder].refresh()
                else:
                    self.runs[folder] = Followed(folder)
                    changed = True
            except (HoldfastError, OSError) as error:
                trouble = str(error)
        if changed or trouble != self.trouble:
            self.trouble = trouble
            self.version += 1
            records = [self._shown(run.record) for run in self.runs.values()]
            self.shown = overlaid(records) if records else []
            self._note_changes()
            self._take_rows()
        return changed

    def _shown(self, record: RunRecord) -> RunRecord:
        """A member goes by its own name, not by that of the federation, which all of them share.

        Rows come more often than the summary is written, so they show how far a job is.
        """
        metrics = [metric for metric in record.metrics if not self.hidden(metric)]
        jobs: list[JobSummary] = [
            {**job, "round": max(job["round"], *rows, 0)}
            for job, rows in zip(record.summary["jobs"], record.counted_rows, strict=True)
        ]
        summary: Summary = {**record.summary, "jobs": jobs}
        return replace(record, name=record.member or record.name, metrics=metrics, summary=summary)

    def news(self, since: str) -> dict[str, Any]:
        """What is new to a reader that has seen everything up to ``since``; otherwise all of it."""
        seen = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", since)
        epoch, count, version = map(int, seen.groups()) if seen else (-1, 0, -1)
        reset = epoch != self._epoch
        return {
            "since": f"{self._epoch}.{len(self._rows)}.{self.version}",
            "reset": reset,
            "rows": self._rows if reset else self._rows[count:],
            "changed": version != self.version,
        }

    def about(self) -> dict[str, Any]:
        """Everything about the curves but their rows."""
        return curves_data(self.shown)

    def _take_rows(self) -> None:
        """Rows are numbered as they come; if that cannot continue, numbering starts again."""
        self._names = columns(self.shown)
        shape = (
            self._names,
            [(run.folder, run.restarts, len(run.record.summary["jobs"])) for run in self.runs.values()],
        )
        if shape != self._shape:
            self._shape, self._rows, self._epoch = shape, [], self._epoch + 1
            self._taken.clear()
        job = 0
        for record in self.shown:
            for rows in record.counted_rows:
                fresh = list(rows.values())[self._taken[job] :]
                self._rows += [row_data(job, row, self._names) for row in fresh]
                self._taken[job] = len(rows)
                job += 1

    # --- how far they are ----------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        """The state of all runs together, in numbers and in words."""
        jobs = [job for record in self.shown for job in record.summary["jobs"]]
        statuses = {record.summary["status"] for record in self.shown}
        status = next((s for s in ("running", "interrupted", "complete") if s in statuses), "waiting")
        return {
            "status": status,
            "done": sum(job["rounds"] if job["status"] in ENDED else job["round"] for job in jobs),
            "rounds": sum(job["rounds"] for job in jobs),
            "text": _progress_text(jobs),
            "age": min((run.age for run in self.runs.values()), default=0.0),
            "title": " and ".join(dict.fromkeys(record.name for record in self.shown)) or "holdfast",
        }

    def _note_changes(self) -> None:
        """Logs how the jobs have changed since the last time."""
        for run, record in zip(self.runs.values(), self.shown, strict=True):
            noted = datetime.fromtimestamp(run.stamps[0][0] / 1e9)
            for place, job in enumerate(record.summary["jobs"]):
                before = self._statuses.get((run.folder, place), "pending")
                if job["status"] == before:
                    continue
                self._statuses[run.folder, place] = job["status"]
                seed = f" seed {job['seed']}" if len({j["seed"] for j in record.summary["jobs"]}) > 1 else ""
                axes = "".join(f" {key.rsplit('.', 1)[-1]}={value}" for key, value in job["axes"].items())
                who = f"{record.prefix}{job['algorithm']}{axes}{seed}"
                self.log.append((f"{noted:%H:%M:%S}", _level(job), f"{who} {_became(job, before)}"))
        del self.log[:-LOG_LINES]


def _progress_text(jobs: Sequence[JobSummary]) -> str:
    running = [at for at, job in enumerate(jobs) if job["status"] == "running"]
    if not running:
        return status_counts(jobs).removeprefix("of ") if jobs else "nothing yet"
    reached, rounds = [jobs[at]["round"] for at in running], jobs[running[0]]["rounds"]
    if len(running) == 1:
        at = running[0]
        place = f", job {at + 1} of {len(jobs)}" if len(jobs) > 1 else ""
        return f"{jobs[at]['algorithm']}: round {reached[0]} of {rounds}{place}"
    slow, fast = min(reached), max(reached)
    return f"round {slow if slow == fast else f'{slow} to {fast}'} of {rounds}, {len(running)} at work"


def _level(job: JobSummary) -> str:
    return {"failed": "error", "diverged": "warning", "interrupted": "warning"}.get(job["status"], "info")


def _became(job: JobSummary, before: str) -> str:
    status, message = job["status"], job.get("message", "")
    if status == "running" and before in ("interrupted", "failed"):
        return f"goes on from round {job['round']}"
    if status in BEGAN:
        return f"{BEGAN[status]} at round {job['round']}" if status == "interrupted" else BEGAN[status]
    after = f" after {job['round']} rounds, {seconds_text(job['seconds'])}"
    return f"{status}{after}" + (f": {message}" if message else "")
