"""Runs the jobs of a plan into a run directory, where an interrupted run can be picked up again."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json, write_tensors
from holdfast.core.precision import switches_restored
from holdfast.data import FederatedData
from holdfast.data.lazy import AnyData
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Measurements
from holdfast.experiments.checkpoints import Checkpoints
from holdfast.experiments.execution import Execution, stop_signals
from holdfast.experiments.extension import extended, is_extension
from holdfast.experiments.metrics import METRICS
from holdfast.experiments.plan import Job, Plan
from holdfast.experiments.record import SETTING_FILES
from holdfast.experiments.record_files import (
    COST_COLUMNS,
    DELAY_COLUMNS,
    EPSILON_COLUMN,
    SETTLED,
    SOLVER_COLUMNS,
    JobStatus,
    Outcome,
    number,
    short,
)
from holdfast.experiments.setting import Setting, facts

# --- A new run directory, and what is written into it before the first round ----------------------------


def new_folder(root: Path, name: str) -> Path:
    """A new, empty folder under ``root``, called by ``name`` and the time."""
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


def named_folder(root: Path, name: str) -> Path:
    """The new, empty folder ``name`` under ``root``."""
    folder = root / name
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name.strip(".") == "":
        raise HoldfastError(f"--name {name}: expected letters, digits, '.', '_' and '-', such as baseline-2")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise HoldfastError(
            f"{folder} exists already: choose another --name, or continue it with: holdfast resume {folder}"
        ) from None
    except OSError as error:
        raise HoldfastError(f"cannot make the run directory {folder}: {error.strerror}") from None
    return folder


def extra_columns(plan: Plan) -> list[str]:
    """What only some experiments record."""
    sporadic = any(plan.setting(job).network.activity is not None for job in plan.jobs)
    solving = any(plan.method(job).capabilities.uses_solver for job in plan.jobs)
    private = any(plan.setting(job).objective.private is not None for job in plan.jobs)
    return (
        (DELAY_COLUMNS if sporadic else [])
        + (SOLVER_COLUMNS if solving else [])
        + ([EPSILON_COLUMN] if private else [])
    )


def job_entry(job: Job) -> dict[str, Any]:
    """What ``summary.json`` says of a job that has not begun."""
    axes = {axis: short(value) for axis, value in job.axes.items()}
    return {
        "id": job.id,
        "algorithm": job.label,
        "seed": job.seed,
        "axes": axes,
        "status": "pending",
        "round": 0,
        "rounds": job.rounds,
        "seconds": 0.0,
    }


def write_setting(folder: Path, setting: Setting, *, durable: bool = True) -> None:
    """The partition and the network as tables."""
    data, labels = setting.data, setting.labels
    named = ["name"] if data.names else []  # such as the hospitals of a table
    header = ["node", *named, "samples", *_class_names(data, labels.shape[1])]
    lines = [
        [node, *(data.names or ())[node : node + 1], int(data.counts[node]), *labels[node].tolist()]
        for node in range(data.nodes)
    ]
    write_csv(folder / "partition.csv", header, lines, durable=durable)
    links = setting.network.weighted_links()
    write_csv(folder / "network.csv", ["i", "j", "weight"], links, durable=durable)


def _class_names(data: AnyData, classes: int) -> list[str]:
    """Of the first ``classes`` labels: there may be more names, of classes that only the test set has."""
    known = data.class_names if isinstance(data, FederatedData) else None
    if known is None or len(known) < classes:
        return list(map(str, range(classes)))
    return list(known[:classes])


def write_csv(path: Path, header: list[str], lines: Sequence[Sequence[Any]], *, durable: bool = True) -> None:
    """A table as a file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    write_atomic(path, text.getvalue().encode(), durable=durable)


# --- where a run took place: versions, device, commit ---------------------------------------------------


def describe_environment(
    device: str, seeds: list[int], processes: int = 1
) -> dict[str, str | int | list[int] | None]:
    """Everything one would ask when a result cannot be reproduced."""
    chosen = torch.device(device)
    gpu = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else None
    return {
        "holdfast": holdfast.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build, such as 2.15.0+cu132, which package metadata may lack
        **{name: version(name) for name in ("numpy", "networkx", "scikit-learn")},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "processes": processes,
        "seeds": seeds,
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of holdfast's own source, with ``+`` if changed since; None if it is not a checkout."""
    source = Path(holdfast.__file__).resolve().parent
    if not (
        source.parent / ".git"
    ).exists():  # installed; the folder above may be a checkout of something else
        return None
    try:
        ask = ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


# --- runs the jobs of a plan into a run directory, where an interrupted run can be picked up again ------


class Interrupted(Exception):  # noqa: N818 - not an error
    """The user or the system asked the run to stop; everything is saved."""


class Runner:
    """A plan and the directory it is run into."""

    def __init__(self, plan: Plan, folder: Path, *, lasting: bool = True) -> None:
        self.plan, self.folder, self.world, self.lasting = plan, folder, plan.world, lasting
        self.checkpoints = Checkpoints(folder / "checkpoints", plan.digest, plan.world)
        self.summary: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.columns: list[str] = []

    # --- beginning -----------------------------------------------------------------------------------------

    @classmethod
    def start(cls, plan: Plan, root: Path, launch: str | None = None, name: str | None = None) -> Runner:
        """Makes a new run directory under ``root``, called ``name`` or by the experiment and the time.

        ``launch`` is what a cluster knows the job by.
        """
        folder = plan.world.text_of_leader(
            lambda: str(new_folder(root, plan.name) if name is None else named_folder(root, name))
        )
        return cls.begin(plan, Path(folder), launch)

    @classmethod
    def begin(cls, plan: Plan, folder: Path, launch: str | None = None, *, lasting: bool = True) -> Runner:
        """Makes ``folder``, which is there and empty, the run directory.

        One that is not ``lasting`` will not be resumed: it has no checkpoints, and figures and models are
        written when it ends.
        """
        runner = cls(plan, folder, lasting=lasting)
        first = plan.setting(plan.jobs[0])
        names = dict.fromkeys(name for job in plan.jobs for name in plan.setting(job).metrics)
        metrics = list(dict.fromkeys([*(name for name in METRICS if name in names), *names]))
        extra = extra_columns(plan)
        runner.columns = ["algorithm", "seed", *plan.axes, "round", *metrics, *extra, *COST_COLUMNS]
        runner.summary = {
            "name": plan.name,
            "status": "running",
            "digest": plan.digest,
            "launch": launch,
            "data_dir": None if plan.data_dir is None else str(plan.data_dir.resolve()),
            "device": plan.device if plan.world.size == 1 else plan.device.split(":")[0],
            "facts": facts(first),
            "jobs": [job_entry(job) for job in plan.jobs],
            **plan.origin.notes,
        }
        if plan.world.leads:
            environment = describe_environment(plan.device, plan.seeds, plan.world.size)
            runner._write_document()
            write_json(runner.folder / "environment.json", environment, durable=lasting)
            write_setting(runner.folder, first, durable=lasting)
        runner._write_metrics()
        runner.write_summary()
        return runner

    @classmethod
    def reopen(cls, plan: Plan, folder: Path, *, extend: bool = False) -> Runner:
        """Picks up the run in ``folder``; ``extend``: if the plan has more rounds, it goes on to these."""
        runner = cls(plan, folder)
        read = json.loads(plan.world.text_of_leader((folder / "summary.json").read_text))
        if extends := extend and is_extension(plan, read):
            read = extended(plan, read)
        elif changes := plan.origin.changes(read):
            raise HoldfastError(f"{folder}: {changes}")
        runner.summary = read
        earlier = (*read.get("earlier_digests", ()), read["digest"])  # the same, written in another way
        runner.checkpoints = replace(runner.checkpoints, earlier=earlier)
        plan.world.text_of_leader(runner._read_rows)
        if extends:
            runner._write_document()
            runner.write_summary()
        runner._write_metrics()
        return runner

    def _read_rows(self) -> str:
        """Reads the rows up to the checkpoints."""
        text = (self.folder / "metrics.csv").read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        self.columns = list(reader.fieldnames or [])
        recorded = list(reader)
        for job, entry in zip(self.plan.jobs, self.summary["jobs"], strict=True):
            settled = entry["status"] in SETTLED
            last = entry["round"] if settled else self._checkpoint_round(job)
            self.rows += [row for row in recorded if _belongs(row, job) and int(row["round"]) <= last]
        return ""

    # --- running -------------------------------------------------------------------------------------------

    @switches_restored()
    def execute(
        self,
        callbacks: Sequence[Callback] = (),
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    ) -> None:
        """Runs every job that is not settled; raises ``Interrupted`` after saving when asked to stop."""
        with stop_signals(*signals, hurry=self.world.size == 1) as asked_to_stop:
            self.run_left(callbacks, asked_to_stop)

    def run_left(self, callbacks: Sequence[Callback], asked: Callable[[], bool]) -> None:
        """As ``execute``, where somebody else watches for signals."""
        for job in self.left:
            if self.run(job, callbacks, asked)[1].status == "interrupted":
                raise Interrupted
        self.close()

    @property
    def left(self) -> list[Job]:
        """The jobs that are not settled."""
        entries = zip(self.plan.jobs, self.summary["jobs"], strict=True)
        return [job for job, entry in entries if entry["status"] not in SETTLED]

    def run(
        self, job: Job, callbacks: Sequence[Callback], asked: Callable[[], bool]
    ) -> tuple[Execution, Outcome]:
        """Runs what is left of ``job``; a settled one is restored as it ended, and nobody is told."""
        entry = next(entry for entry in self.summary["jobs"] if entry["id"] == job.id)
        simulation = self.plan.simulation(job)
        run = Execution(simulation, job.rounds, job.evaluate_every, self.plan.setting(job).evaluation)
        run.seconds = self.checkpoints.restore(job.id, simulation)
        settled = entry["status"] in SETTLED
        if not settled:
            # The last round that a run was begun with was measured; one of more rounds may not do that.
            self.rows = [
                row for row in self.rows if not (_belongs(row, job) and run.skips(int(row["round"])))
            ]
        if settled or simulation.round > 0:
            run.rows = [self._figures(row) for row in self.rows if _belongs(row, job)]
        if settled:
            return run, Outcome(entry["status"], entry.get("message", ""))
        # First of all: what others are told of has been written.
        outcome = run.execute(job.info, [_Recorder(self, job, entry, run), *callbacks], asked)
        if outcome.status == "interrupted":
            self.checkpoint(job, run)
            self.summary["status"] = "interrupted"
            self.write_record()
        return run, outcome

    def close(self) -> None:
        """Notes that nothing is left to run."""
        self.summary["status"] = "complete"
        self.write_record()

    def _figures(self, row: Mapping[str, Any]) -> Measurements:
        """A row of metrics.csv as callbacks know it: numbers only, and none for an empty cell."""
        where, labels = str(self.folder / "metrics.csv"), ("algorithm", "seed", *self.plan.axes)
        numbers = {key: number(where, key, str(value)) for key, value in row.items() if key not in labels}
        return {key: value for key, value in numbers.items() if value is not None}

    # --- what is written -----------------------------------------------------------------------------------

    def record(self, job: Job, row: Measurements) -> None:
        """Appends a row to the metrics."""
        axes = {axis: short(value) for axis, value in job.axes.items()}
        full = {"algorithm": job.label, "seed": job.seed, **axes, **row}
        self.rows.append(full)
        if not self.world.leads or not self.lasting:
            return
        with (self.folder / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(full)

    def _write_document(self) -> None:
        if self.world.leads:
            name, text = self.plan.origin.document(self.plan)
            write_atomic(self.folder / name, text.encode(), durable=self.lasting)

    def _write_metrics(self) -> None:
        if not self.world.leads:
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(self.folder / "metrics.csv", text.getvalue().encode(), durable=self.lasting)

    def write_summary(self) -> None:
        """Writes ``summary.json`` anew."""
        if self.world.leads:
            write_json(self.folder / "summary.json", self.summary, durable=self.lasting)

    def write_record(self) -> None:
        """Writes what has become of the jobs, and their figures if these were not written as they came."""
        if not self.lasting:
            self._write_metrics()
        self.write_summary()

    def save_model(self, job: Job, run: Execution) -> None:
        """Writes the average of all nodes' models."""
        setting = self.plan.setting(job)
        average = self.world.mean(run.simulation.models.detach(), setting.data.nodes)
        complete = setting.problem.tester.complete(average[None], None, self.world.sum)[0]
        if not self.world.leads:
            return
        consensus = setting.problem.model.module(complete)
        target = self.folder / "models" / f"{job.id}.safetensors"
        target.parent.mkdir(exist_ok=True)
        # Copies: safetensors takes no tensors that share memory, as tied weights do.
        tensors = {name: tensor.clone().contiguous() for name, tensor in consensus.state_dict().items()}
        notes = {"algorithm": job.label, "seed": job.seed}
        write_tensors(target, tensors, notes, durable=self.lasting)

    def checkpoint(self, job: Job, run: Execution) -> None:
        """Writes all that resuming needs."""
        if not self.lasting:
            return
        self._write_metrics()  # synced first: after a power cut no row before the checkpoint is missing
        self.checkpoints.write(job.id, run.simulation, run.seconds)

    def _checkpoint_round(self, job: Job) -> int:
        notes = self.checkpoints.notes(job.id)
        # A checkpoint of round 0 counts as none: the job begins again and records its first row.
        return (int(notes["round"]) or -1) if notes else -1


class _Recorder(Callback):
    """Writes rows, checkpoints and the status of a job into the run directory."""

    def __init__(self, runner: Runner, job: Job, entry: dict[str, Any], run: Execution) -> None:
        self.runner, self.job, self.entry, self.run = runner, job, entry, run
        self.saved = -1  # the round of the last checkpoint

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        self.entry["method"] = repr(simulation.method)
        self.entry.pop("message", None)  # of an attempt that failed

    def on_prepared(self, job: JobInfo, how: str) -> None:
        self.entry["executor"] = how

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        self.runner.record(self.job, row)

    def on_round(self, job: JobInfo, round: int) -> None:
        due = round % self.job.checkpoint_every == 0 or round == job.rounds
        if due and not self.run.diverged:
            if round > 0:  # nothing is lost before the first round
                self._checkpoint()
            self._note("running")

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        if outcome.status in SETTLED and not self.run.diverged:
            self.runner.save_model(self.job, self.run)
        if outcome.status in SETTLED and self.saved != self.run.simulation.round:
            self._checkpoint()  # so that the end can be looked at again
        if outcome.message:
            self.entry["message"] = outcome.message
        if outcome.status == "diverged" and not self.run.diverged:
            self.entry["growing"] = True  # in more rounds it would go on
        if self.run.rows:
            self.entry["final"] = {
                name: value for name, value in self.run.rows[-1].items() if math.isfinite(value)
            }
        self._note(outcome.status)

    def _checkpoint(self) -> None:
        self.runner.checkpoint(self.job, self.run)
        self.saved = self.run.simulation.round

    def _note(self, status: JobStatus) -> None:
        reached, seconds = self.run.simulation.round, round(self.run.seconds, 3)
        self.entry.update(status=status, round=reached, seconds=seconds)
        if self.runner.lasting:
            self.runner.write_summary()


def _belongs(row: Mapping[str, Any], job: Job) -> bool:
    mine = {"algorithm": job.label, "seed": str(job.seed), **{k: short(v) for k, v in job.axes.items()}}
    return all(str(row[key]) == value for key, value in mine.items())


def open_run(plan: Plan, run_dir: Path, *, resume: bool, lasting: bool = True) -> Runner:
    """The runner of ``plan`` in ``run_dir``: a new one, or the one that is there if it may be resumed.

    ``lasting``: whether it may be resumed later.
    """
    if (run_dir / "summary.json").is_file():
        if not resume:
            raise HoldfastError(
                f"run_dir: {run_dir} holds a run; go on with it by resume=True, or choose another folder"
            )
        return Runner.reopen(plan, run_dir, extend=True)
    if run_dir.exists() and not (run_dir.is_dir() and all(map(_of_beginning, run_dir.iterdir()))):
        raise HoldfastError(f"run_dir: {run_dir} exists and is no run of holdfast; choose another folder")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HoldfastError(f"cannot make the run directory {run_dir}: {error.strerror}") from None
    return Runner.begin(plan, run_dir, lasting=lasting)


def _of_beginning(path: Path) -> bool:
    """Whether a run that was killed before its first round may have left this."""
    return path.name in (*SETTING_FILES, "setting.toml", "metrics.csv") or path.name.endswith(".partial")
