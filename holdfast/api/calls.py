"""What ``hf.train`` and ``hf.minimize`` share: checks of their arguments, callbacks, how they end."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Cohort, Count, check, quoted
from holdfast.experiments.callbacks import Callback, JobInfo
from holdfast.experiments.execution import Execution, stop_signals
from holdfast.experiments.growth import grown_loss
from holdfast.experiments.statuses import JobStatus, Outcome
from holdfast.report.progress import Progress, somebody_watches

CALLER = 3  # stacklevel of the user's line, from inside them: their decorator is between


def execute(run: Execution, job: JobInfo, callbacks: Sequence[Callback]) -> JobStatus:
    """Runs all rounds; how it ended."""
    with stop_signals(signal.SIGINT) as asked_to_stop:
        outcome = run.execute(job, callbacks, asked_to_stop)
    return settled(run, job, outcome, depth=2)


def settled(run: Execution, job: JobInfo, outcome: Outcome, depth: int = 1) -> JobStatus:
    """The status of a job that ended; an error that ended it is raised."""
    if outcome.error is not None:
        raise outcome.error
    if outcome.status == "diverged":
        message = f"{job.title} diverged: {outcome.message}"
        warnings.warn(message, RuntimeWarning, stacklevel=CALLER + depth)
    elif outcome.status == "done" and (growth := grown_loss(run.rows)):
        warnings.warn(f"{job.title}: {growth}; try a smaller lr", RuntimeWarning, stacklevel=CALLER + depth)
    return outcome.status


def watchers(
    callbacks: Sequence[Callback], progress: bool | None, jobs: Sequence[JobInfo], *, leave: bool = True
) -> list[Callback]:
    """The callbacks, checked, with a progress bar over ``jobs`` if it is wanted."""
    check("progress", bool | None, progress)
    if not isinstance(callbacks, Sequence):
        raise HoldfastError(f"callbacks: expected a list such as [hf.Progress()], got {quoted(callbacks)}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise HoldfastError(f"callbacks: expected instances of hf.Callback, got {quoted(callback)}")
    shown = any(isinstance(callback, Progress) for callback in callbacks)
    if shown or not (somebody_watches() if progress is None else progress):
        return list(callbacks)
    return [*callbacks, Progress(jobs, leave=leave)]


def checked_call(rounds: int, cohort: Cohort) -> tuple[int, Cohort]:
    """What ``train`` and ``minimize`` are both given."""
    return check("rounds", Count, rounds), check("cohort", Cohort, cohort)


def checkpoints_between(given: int | None, run_dir: str | Path | None, rounds: int) -> int:
    """Rounds from one checkpoint to the next; without a ``run_dir``, which goes on, only at the end."""
    return given if given is not None else 50 if run_dir is not None else rounds


def number_type(dtype: object) -> torch.dtype:
    known = {"float32": torch.float32, "float64": torch.float64}
    found = known.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in known.values():
        raise HoldfastError(f"dtype: should be torch.float32 or torch.float64, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found


def needs_folder(run_dir: str | Path | None, *, resume: bool) -> None:
    """Complains if there is nothing to resume from."""
    check("resume", bool, resume)
    if resume and run_dir is None:
        raise HoldfastError("resume: give the run_dir of the run to go on with")
