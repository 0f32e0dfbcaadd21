"""Runs the jobs of a plan into a run directory, where an interrupted run can be picked up again."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import tomli_w

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json, write_tensors
from holdfast.core.precision import switches_restored
from holdfast.engines.common.driver import Row, Run
from holdfast.experiments.checkpoints import Checkpoints
from holdfast.experiments.columns import COST_COLUMNS, DELAY_COLUMNS, SOLVER_COLUMNS
from holdfast.experiments.environment import describe_environment
from holdfast.experiments.metrics import METRICS, has_solver, measure
from holdfast.experiments.plan import Job, Plan, short
from holdfast.experiments.setting import Setting, facts
from holdfast.experiments.statuses import SETTLED, JobStatus


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user or the system asked the run to stop; everything is saved."""


class View(Protocol):
    """Who watches a run: a progress bar, a TensorBoard, a test."""

    def job_started(self, job: Job, first_round: int) -> None: ...
    def job_prepared(self, job: Job, how: str) -> None: ...
    def round_done(self, job: Job, round: int) -> None: ...
    def row_recorded(self, job: Job, row: Row) -> None: ...
    def job_ended(self, job: Job, status: JobStatus) -> None: ...


class Runner:
    """A plan and the directory it is run into."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.world = plan, folder, plan.world
        self.checkpoints = Checkpoints(folder / "checkpoints", plan.digest, plan.world)
        self.views: list[View] = []
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = []

    # --- beginning -----------------------------------------------------------------------------------------

    @classmethod
    def start(cls, plan: Plan, root: Path, launch: str | None = None) -> Runner:
        """Makes a new run directory under ``root``; ``launch`` is what a cluster knows the job by."""
        runner = cls(plan, Path(plan.world.text_of_leader(lambda: str(_new_folder(root, plan.name)))))
        first = plan.setting(plan.jobs[0])
        names = {name for job in plan.jobs for name in plan.setting(job).metrics}
        metrics = [name for name in METRICS if name in names]
        extra = _extra_columns(plan)
        runner.columns = ["algorithm", "seed", *plan.axes, "round", *metrics, *extra, *COST_COLUMNS]
        runner.summary = {
            "name": plan.name,
            "status": "running",
            "digest": plan.digest,
            "launch": launch,
            "data_dir": None if plan.data_dir is None else str(plan.data_dir.resolve()),
            "device": plan.device if plan.world.size == 1 else plan.device.split(":")[0],
            "facts": facts(first),
            "jobs": [_job_entry(job) for job in plan.jobs],
        }
        if plan.world.leads:
            environment = describe_environment(plan.device, plan.seeds, plan.world.size)
            write_atomic(runner.folder / "experiment.toml", tomli_w.dumps(plan.raw).encode())
            write_json(runner.folder / "environment.json", environment)
            _write_setting(runner.folder, first)
        runner._write_metrics()
        runner._write_summary()
        return runner

    @classmethod
    def reopen(cls, plan: Plan, folder: Path) -> Runner:
        """Picks up the run in ``folder``."""
        runner = cls(plan, folder)
        runner.summary = json.loads(plan.world.text_of_leader(runner._read_back))
        runner._write_metrics()
        return runner

    def _read_back(self) -> str:
        """Reads what is recorded up to the checkpoints; the text of summary.json."""
        summary = (self.folder / "summary.json").read_text()
        read = json.loads(summary)
        if read.get("digest") != self.plan.digest:
            raise HoldfastError(
                f"{self.folder}: experiment.toml was changed since the run began; start a new run"
            )
        text = (self.folder / "metrics.csv").read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        self.columns = list(reader.fieldnames or [])
        recorded = list(reader)
        for job, entry in zip(self.plan.jobs, read["jobs"], strict=True):
            settled = entry["status"] in SETTLED
            last = entry["round"] if settled else self._checkpoint_round(job)
            self.rows += [row for row in recorded if _belongs(row, job) and int(row["round"]) <= last]
        return summary

    # --- running -------------------------------------------------------------------------------------------

    @switches_restored()
    def execute(self, views: Sequence[View] = ()) -> None:
        """Runs every job that is not settled; raises ``Interrupted`` after saving when asked to stop."""
        self.views = list(views)
        with _stop_signals(hurry=self.world.size == 1) as stop:
            for job, entry in zip(self.plan.jobs, self.summary["jobs"], strict=True):
                if entry["status"] not in SETTLED:
                    self._run(job, entry, stop)
        self.summary["status"] = "complete"
        self._write_summary()

    def _run(self, job: Job, entry: dict[str, Any], stop: list[bool]) -> None:
        setting = self.plan.setting(job)
        experiment = job.experiment
        run = Run(
            self.plan.simulation(job),
            experiment.rounds,
            experiment.evaluation.every,
            lambda now: measure(now, setting.test, setting.metrics),
        )
        run.seconds = self.checkpoints.restore(job.id, run.simulation)
        entry["method"] = repr(self.plan.method(job))
        entry.pop("message", None)  # of an attempt that failed
        self._notify("job_started", job, run.simulation.round)
        entry["executor"] = run.simulation.prepare(experiment.rounds - run.simulation.round)
        self._notify("job_prepared", job, entry["executor"])
        for row in self._rows_until_failure(run, entry):
            if row is not None:
                self._record(job, row)
            self._notify("round_done", job, run.simulation.round)
            if run.diverged:
                break
            finished = run.simulation.round == experiment.rounds
            if self.world.any(stop[0]) and not finished:
                self._checkpoint(job, run)
                self._update(entry, run, "interrupted")
                self.summary["status"] = "interrupted"
                self._write_summary()
                raise Interrupted
            if run.simulation.round % experiment.checkpoint_every == 0 or finished:
                self._checkpoint(job, run)
                self._update(entry, run, "running")
                self._write_summary()
        if "message" in entry:
            status: JobStatus = "failed"
        elif run.diverged:
            status = "diverged"
            reached = run.simulation.round
            entry["message"] = f"a figure became infinite or NaN by round {reached}: try a smaller lr"
        else:
            status = "done"
            self._save_model(job, setting, run)
        self._update(entry, run, status)
        self._write_summary()
        self._notify("job_ended", job, status)

    def _rows_until_failure(self, run: Run, entry: dict[str, Any]) -> Iterator[Row | None]:
        """The rows of ``run``; an error that we know ends this job and no other, with why in its entry."""
        try:
            yield from run
        except HoldfastError as error:
            entry["message"] = str(error)
        except Exception as error:  # of a user's code, or a mistake of ours: noted, and shown in full
            entry["message"] = " ".join(f"{type(error).__name__}: {error}".split())
            self._update(entry, run, "failed")
            self._write_summary()
            raise

    def _update(self, entry: dict[str, Any], run: Run, status: JobStatus) -> None:
        entry.update(status=status, round=run.simulation.round, seconds=round(run.seconds, 3))

    def _notify(self, event: str, *arguments: Any) -> None:
        for view in self.views:
            getattr(view, event)(*arguments)

    # --- what is written -----------------------------------------------------------------------------------

    def _record(self, job: Job, row: Row) -> None:
        axes = {axis: short(value) for axis, value in job.axes.items()}
        full = {"algorithm": job.label, "seed": job.seed, **axes, **row}
        self.rows.append(full)
        if not self.world.leads:
            return
        with (self.folder / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(full)
        self._notify("row_recorded", job, row)

    def _write_metrics(self) -> None:
        if not self.world.leads:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(self.folder / "metrics.csv", text.getvalue().encode())

    def _write_summary(self) -> None:
        if self.world.leads:
            write_json(self.folder / "summary.json", self.summary)

    def _save_model(self, job: Job, setting: Setting, run: Run) -> None:
        average = self.world.mean(run.simulation.models.detach(), setting.data.nodes)
        if not self.world.leads:
            return
        consensus = setting.objective.model.module(average)
        target = self.folder / "models" / f"{job.id}.safetensors"
        target.parent.mkdir(exist_ok=True)
        # Copies: safetensors takes no tensors that share memory, as tied weights do.
        tensors = {name: tensor.clone().contiguous() for name, tensor in consensus.state_dict().items()}
        write_tensors(target, tensors, {"algorithm": job.label, "seed": job.seed})

    def _checkpoint(self, job: Job, run: Run) -> None:
        self._write_metrics()  # synced first: after a power cut no row before the checkpoint is missing
        self.checkpoints.write(job.id, run.simulation, run.seconds)

    def _checkpoint_round(self, job: Job) -> int:
        notes = self.checkpoints.notes(job.id)
        # A checkpoint of round 0 counts as none: the job begins again and records its first row.
        return (int(notes["round"]) or -1) if notes else -1


def _new_folder(root: Path, name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1000):
        folder = root / (stem if attempt == 0 else f"{stem}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise HoldfastError(f"cannot make the run directory {folder}: {error.strerror}") from None
        return folder
    raise HoldfastError(f"cannot make a run directory for {stem} under {root}: too many of that name")


def _extra_columns(plan: Plan) -> list[str]:
    """What only some experiments record."""
    sporadic = any(plan.setting(job).network.activity is not None for job in plan.jobs)
    solving = any(has_solver(plan.method(job)) for job in plan.jobs)
    return (DELAY_COLUMNS if sporadic else []) + (SOLVER_COLUMNS if solving else [])


def _job_entry(job: Job) -> dict[str, Any]:
    axes = {axis: short(value) for axis, value in job.axes.items()}
    return {
        "id": job.id,
        "algorithm": job.label,
        "seed": job.seed,
        "axes": axes,
        "status": "pending",
        "round": 0,
        "rounds": job.experiment.rounds,
        "seconds": 0.0,
    }


def _belongs(row: dict[str, str], job: Job) -> bool:
    mine = {"algorithm": job.label, "seed": str(job.seed), **{k: short(v) for k, v in job.axes.items()}}
    return all(row[key] == value for key, value in mine.items())


def _write_setting(folder: Path, setting: Setting) -> None:
    """The partition and the network as tables."""
    data, labels = setting.data, setting.labels
    header = ["node", "samples", *(str(label) for label in range(labels.shape[1]))]
    lines = [[node, int(data.counts[node]), *labels[node].tolist()] for node in range(data.nodes)]
    _write_csv(folder / "partition.csv", header, lines)
    _write_csv(folder / "network.csv", ["i", "j", "weight"], setting.network.weighted_links())


def _write_csv(path: Path, header: list[str], lines: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    write_atomic(path, text.getvalue().encode())


@contextmanager
def _stop_signals(hurry: bool) -> Iterator[list[bool]]:
    """Ctrl-C and SIGTERM set the flag, to be looked at after the round; to ``hurry``, a second Ctrl-C stops.

    Ranks may hear of one Ctrl-C twice, from the terminal and from torchrun.
    """
    stop = [False]

    def ask(number: int, frame: FrameType | None) -> None:
        if hurry and stop[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop[0] = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
