"""Progress of a run in a terminal or a notebook."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Measurements
from holdfast.experiments.record_files import JobStatus, Outcome
from holdfast.experiments.runner import Interrupted, Runner
from holdfast.report.format import format_value, metric_title
from holdfast.report.terminal import DIGITS, HEADS

LIVE_METRICS = ("test_accuracy", "worst_accuracy", "train_loss", "consensus", "grad_norm2", "payload_bytes")
REFRESHES = 8  # per second


def somebody_watches() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Whether this code runs in the cell of a notebook (Jupyter, Colab, Databricks)."""
    return Console(file=io.StringIO()).is_jupyter


class Progress(Callback):
    """A progress bar over all rounds of all jobs, and a table of the latest figures of each job.

    ``jobs``: those that will be run, if that is known. ``console``: where to show it; by default the notebook
    that this runs in, else standard error. ``leave``: whether the table stays when all jobs are over.
    """

    late = True

    def __init__(
        self, jobs: Sequence[JobInfo] = (), console: Console | None = None, *, leave: bool = True
    ) -> None:
        self.latest: dict[JobInfo, Measurements] = {}
        self.status: dict[JobInfo, JobStatus] = {}
        self.how = Text()  # how the current job is computed
        self.jobs = list(jobs)
        self.leave = leave
        notebook = console is None and in_notebook()
        self.console = console or Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds, left:"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task: TaskID = self.bar.add_task("starting")
        self.live: Live | _NotebookLive = (
            _NotebookLive()
            if notebook
            else Live(self.bar, console=self.console, refresh_per_second=REFRESHES, transient=True)
        )

    def expect(self, jobs: Sequence[JobInfo]) -> None:
        """More jobs will be run."""
        self.jobs += [job for job in jobs if job not in self.jobs]

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        self.expect([job])
        self.live.start()
        self.bar.update(self.task, description=f"preparing {job.title}", total=self._rounds_of(self.jobs))
        self.on_round(job, simulation.round)

    def on_prepared(self, job: JobInfo, how: str) -> None:
        self.bar.update(self.task, description=job.title)
        self.how = Text(how, style="dim")
        self._show()

    def on_round(self, job: JobInfo, round: int) -> None:
        before = self.jobs[: self.jobs.index(job)]
        self.bar.update(self.task, completed=self._rounds_of(before) + round)
        if isinstance(self.live, _NotebookLive):
            self._show()  # a terminal refreshes itself

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        self.latest[job] = row
        self._show()

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        self.status[job] = outcome.status
        self._show()
        self.live.stop()
        if self.leave and all(job in self.status for job in self.jobs):
            if isinstance(self.live, _NotebookLive):
                self.live.put(self._figures())
            else:
                self.console.print(self._figures())

    def _rounds_of(self, jobs: Sequence[JobInfo]) -> int:
        return sum(job.rounds for job in jobs)

    def _show(self) -> None:
        self.live.update(Group(self._figures(), self.how, self.bar))

    def _figures(self) -> Table:
        """The latest figures, at most of the last dozen jobs."""
        shown = [job for job in self.jobs if job in self.latest][-12:]
        metrics = [name for name in LIVE_METRICS if any(name in self.latest[job] for job in shown)]
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        for head in ("algorithm", "round", *(HEADS.get(name, metric_title(name)) for name in metrics)):
            table.add_column(head, justify="left" if head == "algorithm" else "right", vertical="bottom")
        for job in shown:
            row = self.latest[job]
            figures = [format_value(name, row[name], DIGITS) if name in row else "" for name in metrics]
            title = Text(job.title)
            if (status := self.status.get(job, "running")) not in ("done", "running"):
                title.append(f" {status}", style="red" if status in ("diverged", "failed") else "yellow")
            table.add_row(title, f"{row['round']:.0f}/{job.rounds}", *figures)
        return table


def run_watched(callbacks: Sequence[Callback], asked: Callable[[], bool]) -> Callable[[Runner], None]:
    """Runs the rest of one run directory after the other; progress bars get to know the jobs first."""

    def run(runner: Runner) -> None:
        if asked():
            raise Interrupted
        for callback in callbacks:
            if isinstance(callback, Progress):
                callback.expect([job.info for job in runner.left])
        runner.run_left(callbacks, asked)

    return run


class _NotebookLive:
    """What ``rich.live.Live`` is in a terminal: one output of the cell that is replaced again and again.

    Only IPython is needed, which every notebook has. rich's own form needs ipywidgets.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.shown = 0.0

    def start(self) -> None:
        from IPython.display import HTML, display

        if self.handle is None:
            self.handle = display(HTML(""), display_id=True)

    def update(self, content: RenderableType) -> None:
        if time.monotonic() - self.shown >= 1 / REFRESHES:
            self.put(content)

    def put(self, content: RenderableType) -> None:
        """Shows ``content`` now."""
        from IPython.display import HTML

        self.handle.update(HTML(notebook_html(content)))
        self.shown = time.monotonic()

    def stop(self) -> None:
        """Nothing runs in the background."""


def notebook_html(content: RenderableType) -> str:
    """``content`` as HTML, in the notebook's own colours."""
    console = Console(file=io.StringIO(), record=True, width=100, force_jupyter=False, force_terminal=True)
    console.print(content)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height: 1.3; overflow-x: auto">{code}</pre>'
    )
