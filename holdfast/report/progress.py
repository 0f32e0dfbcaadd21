"""What the terminal shows while a run is under way."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from holdfast.engines.common.driver import Row
from holdfast.experiments.plan import Job, Plan
from holdfast.experiments.statuses import JobStatus
from holdfast.report.format import format_value
from holdfast.report.terminal import DIGITS, HEADS

LIVE_METRICS = ("test_accuracy", "worst_accuracy", "train_loss", "consensus", "grad_norm2", "payload_bytes")


class LiveView:
    """A progress bar over all rounds of all jobs, and a table of the latest figures of each job."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.latest: dict[str, Row] = {}
        self.status: dict[str, JobStatus] = {}
        self.how = Text()  # the job under way is run
        self.jobs = plan.jobs
        self.bar = Progress(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds, left:"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task: TaskID = self.bar.add_task(
            "starting", total=sum(job.experiment.rounds for job in plan.jobs)
        )
        # Gone when the run is over: the table of results takes its place.
        self.live = Live(self.bar, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.__exit__(kind, error, trace)

    def job_started(self, job: Job, first_round: int) -> None:
        before = self.jobs[: self.jobs.index(job)]
        done = sum(other.experiment.rounds for other in before) + first_round
        self.bar.update(self.task, description=f"preparing {job.title}", completed=done)

    def job_prepared(self, job: Job, how: str) -> None:
        self.bar.update(self.task, description=job.title)
        self.how = Text(how, style="dim")
        self._show()

    def round_done(self, job: Job, round: int) -> None:
        before = self.jobs[: self.jobs.index(job)]
        self.bar.update(self.task, completed=sum(other.experiment.rounds for other in before) + round)

    def row_recorded(self, job: Job, row: Row) -> None:
        self.latest[job.id] = row
        self._show()

    def job_ended(self, job: Job, status: JobStatus) -> None:
        self.status[job.id] = status
        self._show()

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
            table.add_row(title, f"{row['round']:.0f}/{job.experiment.rounds}", *figures)
        return table
