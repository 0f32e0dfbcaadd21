"""What can become of a job, and which jobs a resumed run leaves alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

JobStatus = Literal["done", "diverged", "failed", "interrupted", "running", "pending"]
"""As in ``summary.json``.

``done``: all rounds were run. ``diverged``: a figure became infinite or NaN. ``failed``: an error ended the
job, and its ``message`` says which. ``interrupted``: it was asked to stop. ``running``: under way, or killed.
"""

SETTLED = ("done", "diverged")
"""Running these again would give the same, so ``holdfast resume`` leaves them alone."""

ENDED = (*SETTLED, "failed")
"""What made a job fail may be mended by now, so ``holdfast resume`` tries failed jobs again."""


def status_counts(jobs: Sequence[Mapping[str, Any]]) -> str:
    """How many jobs have each status, such as ``of 5 jobs, 3 done, 1 failed, 1 not started``."""
    words = {
        "done": "done",
        "diverged": "diverged",
        "failed": "failed",
        "interrupted": "interrupted",
        "running": "unfinished",
        "pending": "not started",
    }
    counted = [(sum(job["status"] == status for job in jobs), word) for status, word in words.items()]
    listed = ", ".join(f"{count} {word}" for count, word in counted if count)
    return f"of {len(jobs)} job{'s' if len(jobs) > 1 else ''}, {listed}"
