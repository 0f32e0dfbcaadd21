"""Runs the presets of experiments into run directories, and picks up those that were begun before."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.option_forms import as_choice
from holdfast.experiments.plan import Job, Plan
from holdfast.experiments.record import RunRecord, load_record
from holdfast.experiments.record_files import SETTLED, Outcome, Summary, read_summary
from holdfast.experiments.runner import Runner
from holdfast.experiments.setting import Setting, load_dataset
from holdfast.report.format import seconds_text
from holdfast_papers.base import Circumstances, Paper, PaperExperiment, Preset

CALL = 1e6  # what calling for a gradient takes, in multiply-adds that are computed meanwhile


@dataclass(frozen=True)
class Task:
    """A preset at one scale, and the folder with its runs."""

    paper: Paper
    experiment: PaperExperiment
    preset: Preset
    circumstances: Circumstances
    folder: Path
    seed: int | None = None  # only this one of the preset's seeds

    @cached_property
    def raw(self) -> dict[str, Any]:
        changes = list(self.preset.small) if self.circumstances.scale == "small" else []
        raw = read_experiment(self.paper.preset_path(self.preset), changes)
        if self.seed is None:
            return raw
        if self.seed not in raw["seeds"]:
            raise HoldfastError(f"{self.title}: there is no seed {self.seed}, only {raw['seeds']}")
        return raw | {"seeds": [self.seed]}

    def runs(self) -> list[Task]:
        """What to run: the preset as it stands, or each of its seeds where one was run by itself before."""
        parts = [replace(self, seed=seed) for seed in self.raw["seeds"]]
        apart = len(parts) > 1 and self.run_directory() is None
        return parts if apart and any(part.run_directory() for part in parts) else [self]

    @property
    def title(self) -> str:
        return f"{self.paper.id}/{self.preset.file}"

    def plan(self) -> Plan:
        """A new plan; the data that it keeps are freed with it."""
        return Plan.of_tables(self.raw, self.circumstances.data_dir, self.circumstances.device)

    def run_directory(self) -> Path | None:
        """The newest run of exactly this experiment, whole or in part."""
        digest = self.plan().digest
        found = [
            file.parent
            for file in self.folder.glob("*/summary.json")
            if _summary(file).get("digest") == digest
        ]
        return max(found, default=None, key=lambda folder: folder.stat().st_mtime)

    @property
    def finished(self) -> bool:
        folder = self.run_directory()
        return folder is not None and _is_complete(folder)

    def missing_data(self) -> str | None:
        """How to get the data set that is not there, if that is so."""
        problem = self.plan().jobs[0].spec.problem
        try:
            load_dataset(
                as_choice("problem.dataset", problem.dataset), problem.nodes, 0, self.circumstances.data_dir
            )
        except HoldfastError as error:
            return str(error)
        return None

    def check(self) -> float:
        """Raises what would stop the run, tried with its first seed; the multiply-adds it takes, roughly."""
        seeds = self.plan().seeds
        plan = Plan.of_tables(
            self.raw | {"seeds": seeds[:1]}, self.circumstances.data_dir, self.circumstances.device
        )
        try:
            plan.check()
        except HoldfastError as error:
            raise HoldfastError(f"{self.title}: {error}") from None
        example = plan.setting(plan.jobs[0])
        return len(seeds) * sum(job.spec.rounds * cost_of_round(job, example) for job in plan.jobs)

    def finished_part(self) -> RunRecord | None:
        """What was run to its end so far, whole or in seeds; None if nothing was.

        Claims compare seed by seed, so it is the jobs of those seeds in which most jobs are finished.
        """
        begun = [folder for run in self.runs() if (folder := run.run_directory())]
        if not begun:
            return None
        record = joined([load_record(folder) for folder in begun])
        done: dict[int, set[str]] = {}
        for job in record.summary["jobs"]:
            if job["status"] in SETTLED:
                done.setdefault(job["seed"], set()).add(f"{job['algorithm']} {job['axes']}")
        most = max(done.values(), key=len, default=set())
        kept = [
            job for job in record.summary["jobs"] if job["status"] in SETTLED and done[job["seed"]] == most
        ]
        return replace(record, summary={**record.summary, "jobs": kept}) if kept else None

    def execute(self, progress: PaperProgress) -> Path:
        """Runs what is left to run; the run directory."""
        if self.seed is None:
            return self._execute(progress)
        with locked(self.folder, f".lock-{self.seed}"):
            return self._execute(progress)

    def _execute(self, progress: PaperProgress) -> Path:
        begun = self.run_directory()
        if begun is not None and _is_complete(begun):
            return begun
        plan = self.plan()
        runner = Runner.reopen(plan, begun) if begun else Runner.start(plan, self.folder)
        runner.execute([_JobView(progress, runner)])
        progress.report(self.title)
        return runner.folder


def joined(parts: Sequence[RunRecord]) -> RunRecord:
    """Runs of the same preset, each with seeds of its own, as one."""
    jobs = [job for part in parts for job in part.summary["jobs"]]
    rows = [row for part in parts for row in part.rows]
    return replace(parts[0], summary={**parts[0].summary, "jobs": jobs}, rows=rows)


class PaperProgress:
    """A bar over the work of all tasks, with the time that has passed.

    The time that is left is not shown: multiply-adds tell little about it, where one method takes a step and
    another solves a problem to the end.
    """

    def __init__(self, console: Console, work: float) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self.task = self.bar.add_task("starting", total=max(work, 1.0))

    def show(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def advance(self, work: float) -> None:
        self.bar.advance(self.task, work)

    def note(self, words: str) -> None:
        """A line that stays."""
        self.bar.console.print(words, style="dim", highlight=False)

    def report(self, what: str) -> None:
        """A line that stays, also where the output is a file and has no bar."""
        bar = next(task for task in self.bar.tasks if task.id == self.task)
        self.note(f"{what} done: {bar.percentage:.0f} % of all, after {seconds_text(bar.elapsed or 0.0)}")


class _JobView(Callback):
    """Tells the bar of a run's rounds; drops the checkpoints of jobs that have ended, as they are large."""

    def __init__(self, progress: PaperProgress, runner: Runner) -> None:
        self.progress, self.runner = progress, runner
        self.example = runner.plan.setting(runner.plan.jobs[0])
        self.round = 0
        self.cost = 0.0
        for job, entry in zip(runner.plan.jobs, runner.summary["jobs"], strict=True):
            if entry["status"] in SETTLED:
                progress.advance(job.spec.rounds * cost_of_round(job, self.example))

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        self.progress.show(f"{self.runner.folder.parent.name} {job.title}")
        [own] = [planned for planned in self.runner.plan.jobs if planned.id == job.id]
        self.cost = cost_of_round(own, self.example)
        self.round = simulation.round
        self.progress.advance(self.round * self.cost)

    def on_round(self, job: JobInfo, round: int) -> None:
        self.progress.advance((round - self.round) * self.cost)
        self.round = round

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        if outcome.status == "interrupted":
            return
        self.progress.advance((job.rounds - self.round) * self.cost)
        (self.runner.folder / "checkpoints" / f"{job.id}.safetensors").unlink(missing_ok=True)


def cost_of_round(job: Job, example: Setting) -> float:
    """Multiply-adds of a round, roughly, by the data and model of ``example``: for sharing out the time."""
    problem, steps = job.spec.problem, job.config.parameters.get("local_steps", 1)
    samples = len(example.data) if problem.batch_size == "full" else problem.batch_size * problem.nodes
    return (steps if isinstance(steps, int) else 1) * (CALL + samples * example.dim)


@contextmanager
def locked(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Holds ``folder``, so that no second process runs the same experiment into it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HoldfastError(
                f"another process is running this experiment into {folder}; wait for it, or choose another "
                "--runs-dir"
            ) from None
        yield


def _is_complete(folder: Path) -> bool:
    return bool(_summary(folder / "summary.json")["status"] == "complete")


def _summary(file: Path) -> Summary:
    try:
        return read_summary(file)
    except HoldfastError as error:
        raise HoldfastError(f"{error}; delete {file.parent} to run it again") from None
