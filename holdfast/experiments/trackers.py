"""Logging to MLflow and to Weights & Biases, optional extras."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import parameters
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Measurements
from holdfast.experiments.record_files import Outcome

# --- logging to MLflow and to Weights & Biases, optional extras -----------------------------------------


class MLflow(Callback):
    """Logs every job as a run of MLflow (``pip install 'holdfast[mlflow]'``).

    ``experiment``: its name in MLflow, made if it is not there. ``tracking_uri``: where MLflow stores, such
    as "sqlite:///mlflow.db" or the address of a server; by default what MLflow itself is set to. ``tags``: of
    every run. A resumed job is a new run that begins with the figures recorded before.
    """

    def __init__(
        self,
        experiment: str = "holdfast",
        *,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        mlflow: Any = _import("mlflow", "MLflow")
        self._metric: Any = import_module("mlflow.entities").Metric
        self.client: Any = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self.experiment, self.tags = experiment, dict(tags or {})
        self.run_id = ""

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        known = self.client.get_experiment_by_name(self.experiment)
        home = known.experiment_id if known else self.client.create_experiment(self.experiment)
        tags = {**self.tags, "holdfast.job": job.id}
        self.run_id = self.client.create_run(home, run_name=job.title, tags=tags).info.run_id
        for name, value in hyperparameters(job, simulation).items():
            self.client.log_param(self.run_id, name, value)

    def on_resume(self, job: JobInfo, rows: Sequence[Measurements]) -> None:
        for row in rows:
            self.on_evaluate(job, row)

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        now, step = int(time.time() * 1000), int(row["round"])
        metrics = [
            self._metric(name, float(value), now, step)
            for name, value in row.items()
            if name != "round" and math.isfinite(value)  # databases have no NaN
        ]
        self.client.log_batch(self.run_id, metrics=metrics)

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        self.client.set_tag(self.run_id, "holdfast.status", outcome.status)
        ended = {"failed": "FAILED", "diverged": "FAILED", "interrupted": "KILLED"}
        self.client.set_terminated(self.run_id, ended.get(outcome.status, "FINISHED"))


class WandB(Callback):
    """Logs every job as a run of Weights & Biases (``pip install 'holdfast[wandb]'``).

    ``project``: its name there. ``mode``: "offline" writes to ``folder`` only, for ``wandb sync`` later; by
    default what ``WANDB_MODE`` says. ``group``, ``tags``: of every run. A resumed job is a new run that
    begins with the figures recorded before.
    """

    def __init__(
        self,
        project: str = "holdfast",
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self._wandb: Any = _import("wandb", "Weights & Biases")
        self.settings = {"project": project, "mode": mode, "dir": folder, "group": group, "tags": list(tags)}
        self.run: Any = None

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        config = hyperparameters(job, simulation)
        self.run = self._wandb.init(name=job.title, config=config, reinit="create_new", **self.settings)

    def on_resume(self, job: JobInfo, rows: Sequence[Measurements]) -> None:
        for row in rows:
            self.on_evaluate(job, row)

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        self.run.log(row, step=int(row["round"]))

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        self.run.summary["status"] = outcome.status
        self.run.finish(exit_code=1 if outcome.status in ("failed", "diverged") else 0)


def hyperparameters(job: JobInfo, simulation: Simulation) -> dict[str, int | float | str]:
    """What a job is told apart by: the method and its hyperparameters, nodes, rounds, parameters."""
    method = simulation.method
    given = {name: getattr(method, name) for name in parameters(type(method))}
    plain = {name: v if isinstance(v, int | float | str) else repr(v) for name, v in given.items()}
    sizes = {"nodes": simulation.problem.nodes, "dimension": simulation.problem.dim}
    return {"algorithm": type(method).__name__, **plain, "rounds": job.rounds, **sizes}


def _import(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError:
        raise HoldfastError(f"{name} is not installed: pip install 'holdfast[{module}]'") from None


# --- logging to TensorBoard, an optional extra ----------------------------------------------------------


def summary_writer() -> Any:
    """torch's class that writes event files, if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise HoldfastError(
            "TensorBoard is not installed: pip install 'holdfast[tensorboard]', or drop --tensorboard"
        ) from None
    return SummaryWriter


class TensorBoard(Callback):
    """Writes every recorded figure under ``folder``, in a folder of its own for each job."""

    late = True

    def __init__(self, folder: str | Path) -> None:
        self._make_writer = summary_writer()
        self.folder = Path(folder)
        self.writer: Any = None

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})"

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        self.writer = self._make_writer(str(self.folder / job.id), purge_step=simulation.round + 1)

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        for name, value in row.items():
            if name != "round":
                self.writer.add_scalar(name, value, int(row["round"]))
        self.writer.flush()

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        self.writer.close()
