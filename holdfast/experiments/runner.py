"""Runs the jobs of a plan into a run directory, where an interrupted run can be picked up again."""

from __future__ import annotations

import csv
import io
import json
import signal
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import tomli_w

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json, write_tensors
from holdfast.core.precision import switches_restored
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.assembly import Setting
from holdfast.experiments.callbacks import Callback, JobInfo, Row
from holdfast.experiments.checkpoints import Checkpoints
from holdfast.experiments.columns import COST_COLUMNS, DELAY_COLUMNS, SOLVER_COLUMNS
from holdfast.experiments.environment import describe_environment
from holdfast.experiments.execution import Run, stop_signals
from holdfast.experiments.metrics import METRICS
from holdfast.experiments.plan import Job, Plan, short
from holdfast.experiments.setting import facts
from holdfast.experiments.statuses import SETTLED, JobStatus, Outcome


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user or the system asked the run to stop; everything is saved."""


class Runner:
    """A plan and the directory it is run into."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder, self.world = plan, folder, plan.world
        self.checkpoints = Checkpoints(folder / "checkpoints", plan.digest, plan.world)
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
        runner.write_summary()
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
    def execute(self, callbacks: Sequence[Callback] = ()) -> None:
        """Runs every job that is not settled; raises ``Interrupted`` after saving when asked to stop."""
        with stop_signals(signal.SIGINT, signal.SIGTERM, hurry=self.world.size == 1) as asked_to_stop:
            for job, entry in zip(self.plan.jobs, self.summary["jobs"], strict=True):
                if entry["status"] not in SETTLED:
                    self._run(job, entry, callbacks, asked_to_stop)
        self.summary["status"] = "complete"
        self.write_summary()

    def _run(
        self, job: Job, entry: dict[str, Any], callbacks: Sequence[Callback], asked: Callable[[], bool]
    ) -> None:
        setting, experiment = self.plan.setting(job), job.experiment
        simulation = self.plan.simulation(job)
        run = Run(simulation, experiment.rounds, experiment.evaluate_every, setting.measure)
        run.seconds = self.checkpoints.restore(job.id, simulation)
        # First of all: what others are told of has been written.
        outcome = run.execute(job.info, [_Recorder(self, job, entry, run), *callbacks], asked)
        if outcome.status == "interrupted":
            self.checkpoint(job, run)
            self.summary["status"] = "interrupted"
            self.write_summary()
            raise Interrupted

    # --- what is written -----------------------------------------------------------------------------------

    def record(self, job: Job, row: Row) -> None:
        """Appends a row to the metrics."""
        axes = {axis: short(value) for axis, value in job.axes.items()}
        full = {"algorithm": job.label, "seed": job.seed, **axes, **row}
        self.rows.append(full)
        if not self.world.leads:
            return
        with (self.folder / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(full)

    def _write_metrics(self) -> None:
        if not self.world.leads:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(self.folder / "metrics.csv", text.getvalue().encode())

    def write_summary(self) -> None:
        """Writes ``summary.json`` anew."""
        if self.world.leads:
            write_json(self.folder / "summary.json", self.summary)

    def save_model(self, job: Job, run: Run) -> None:
        """Writes the average of all nodes' models."""
        setting = self.plan.setting(job)
        average = self.world.mean(run.simulation.models.detach(), setting.data.nodes)
        complete = setting.objective.complete(average[None], None, self.world.sum)[0]
        if not self.world.leads:
            return
        consensus = setting.objective.model.module(complete)
        target = self.folder / "models" / f"{job.id}.safetensors"
        target.parent.mkdir(exist_ok=True)
        # Copies: safetensors takes no tensors that share memory, as tied weights do.
        tensors = {name: tensor.clone().contiguous() for name, tensor in consensus.state_dict().items()}
        write_tensors(target, tensors, {"algorithm": job.label, "seed": job.seed})

    def checkpoint(self, job: Job, run: Run) -> None:
        """Writes all that resuming needs."""
        self._write_metrics()  # synced first: after a power cut no row before the checkpoint is missing
        self.checkpoints.write(job.id, run.simulation, run.seconds)

    def _checkpoint_round(self, job: Job) -> int:
        notes = self.checkpoints.notes(job.id)
        # A checkpoint of round 0 counts as none: the job begins again and records its first row.
        return (int(notes["round"]) or -1) if notes else -1


class _Recorder(Callback):
    """Writes rows, checkpoints and the status of a job into the run directory."""

    def __init__(self, runner: Runner, job: Job, entry: dict[str, Any], run: Run) -> None:
        self.runner, self.job, self.entry, self.run = runner, job, entry, run

    def job_started(self, job: JobInfo, simulation: Simulation) -> None:
        self.entry["method"] = repr(simulation.method)
        self.entry.pop("message", None)  # of an attempt that failed

    def job_prepared(self, job: JobInfo, how: str) -> None:
        self.entry["executor"] = how

    def row_recorded(self, job: JobInfo, row: Row) -> None:
        self.runner.record(self.job, row)

    def round_done(self, job: JobInfo, round: int) -> None:
        due = round % self.job.experiment.checkpoint_every == 0 or round == job.rounds
        if due and not self.run.diverged:
            self.runner.checkpoint(self.job, self.run)
            self._note("running")

    def job_ended(self, job: JobInfo, outcome: Outcome) -> None:
        if outcome.status in ("done", "stopped"):
            self.runner.save_model(self.job, self.run)
        if outcome.message:
            self.entry["message"] = outcome.message
        self._note(outcome.status)

    def _note(self, status: JobStatus) -> None:
        reached, seconds = self.run.simulation.round, round(self.run.seconds, 3)
        self.entry.update(status=status, round=reached, seconds=seconds)
        self.runner.write_summary()


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
    solving = any(plan.method(job).uses_solver for job in plan.jobs)
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
