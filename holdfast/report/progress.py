"""What the terminal shows while a run is under way."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Row
from holdfast.experiments.statuses import JobStatus, Outcome
from holdfast.report.format import format_value
from holdfast.report.terminal import DIGITS, HEADS

LIVE_METRICS = ("test_accuracy", "worst_accuracy", "train_loss", "consensus", "grad_norm2", "payload_bytes")


class Progress(Callback):
    """A progress bar over all rounds of all jobs, and a table of the latest figures of each job.

    ``jobs``: those that will be run, if that is known. The display is gone when a job is over.
    """

    late = True

    def __init__(self, jobs: Sequence[JobInfo] = (), console: Console | None = None) -> None:
        self.latest: dict[str, Row] = {}
        self.status: dict[str, JobStatus] = {}
        self.how = Text()  # the job under way is run
        self.jobs = list(jobs)
        self.console = console or Console()
        self.bar = Bar(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds, left:"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task: TaskID = self.bar.add_task("starting")
        self.live = Live(self.bar, console=self.console, refresh_per_second=8, transient=True)

    def job_started(self, job: JobInfo, simulation: Simulation) -> None:
        if job not in self.jobs:
            self.jobs.append(job)
        self.bar.update(self.task, description=f"preparing {job.title}", total=self._rounds_of(self.jobs))
        self.round_done(job, simulation.round)
        self.live.start()

    def job_prepared(self, job: JobInfo, how: str) -> None:
        self.bar.update(self.task, description=job.title)
        self.how = Text(how, style="dim")
        self._show()

    def round_done(self, job: JobInfo, round: int) -> None:
        before = self.jobs[: self.jobs.index(job)]
        self.bar.update(self.task, completed=self._rounds_of(before) + round)

    def row_recorded(self, job: JobInfo, row: Row) -> None:
        self.latest[job.id] = row
        self._show()

    def job_ended(self, job: JobInfo, outcome: Outcome) -> None:
        self.status[job.id] = outcome.status
        self._show()
        self.live.stop()

    def _rounds_of(self, jobs: Sequence[JobInfo]) -> int:
        return sum(job.rounds for job in jobs)

    def _show(self) -> None:
        self.live.update(Group(self._figures(), self.how, self.bar))

    def _figures(self) -> Table:
        """The latest figures, at most of the last dozen jobs."""
        shown = [job for job in self.jobs if job.id in self.latest][-12:]
        metrics = [name for name in LIVE_METRICS if any(name in self.latest[job.id] for job in shown)]
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for head in ("algorithm", "round", *(HEADS[name] for name in metrics)):
            table.add_column(head, justify="left" if head == "algorithm" else "right", vertical="bottom")
        for job in shown:
            row = self.latest[job.id]
            figures = [format_value(name, row[name], DIGITS) if name in row else "" for name in metrics]
            title = Text(job.title)
            if (status := self.status.get(job.id, "running")) in ("diverged", "failed"):
                title.append(f" {status}", style="red")
            table.add_row(title, f"{row['round']:.0f}/{job.rounds}", *figures)
        return table
