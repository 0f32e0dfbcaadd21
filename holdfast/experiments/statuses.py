"""What can become of a job, and which jobs a resumed run leaves alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.core.errors import HoldfastError

JobStatus = Literal["done", "stopped", "diverged", "failed", "interrupted", "running", "pending"]
"""As in ``summary.json`` and in the results of ``hf.train`` and ``hf.minimize``.

``done``: all rounds were run. ``stopped``: a callback ended the job early. ``diverged``: a figure became
infinite or NaN, which ends the job, or grew without bound until the last round (see ``growth``). ``failed``:
an error ended the job, and its ``message`` says which. ``interrupted``: the user or the system asked it to
stop. ``running``: under way, or killed.
"""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: JobStatus
    message: str = ""  # why, in one line; empty if that goes without saying
    error: HoldfastError | None = None  # what made it fail, if we know such errors


SETTLED = ("done", "stopped", "diverged")
"""Running these again would give the same, so ``holdfast resume`` leaves them alone."""

ENDED = (*SETTLED, "failed")
"""What made a job fail may be mended by now, so ``holdfast resume`` tries failed jobs again."""


def status_counts(jobs: Sequence[Mapping[str, Any]]) -> str:
    """How many jobs have each status, such as ``of 5 jobs, 3 done, 1 failed, 1 not started``."""
    words = {
        "done": "done",
        "stopped": "stopped early",
        "diverged": "diverged",
        "failed": "failed",
        "interrupted": "interrupted",
        "running": "unfinished",
        "pending": "not started",
    }
    counted = [(sum(job["status"] == status for job in jobs), word) for status, word in words.items()]
    listed = ", ".join(f"{count} {word}" for count, word in counted if count)
    return f"of {len(jobs)} job{'s' if len(jobs) > 1 else ''}, {listed}"
