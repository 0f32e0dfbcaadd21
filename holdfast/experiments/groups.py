"""The seeds of one algorithm at one point of a sweep, and what became of them together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from holdfast.experiments.record_files import JobSummary, RecordedRow

GroupStatus = Literal["done", "stopped", "diverged", "failed", "interrupted", "unfinished", "pending"]


@dataclass(frozen=True)
class Group:
    """All seeds of one algorithm at one point of the sweep: one curve, one line of the table."""

    algorithm: str
    tuning: str  # as in FinalRow
    problem: str
    contest: str
    jobs: list[JobSummary]
    counted: list[int]  # which jobs of the run are the seeds that count
    seeds: list[dict[int, RecordedRow]]  # for every seed that counts: round -> row

    @property
    def label(self) -> str:
        """Such as ``local-gecl h=0.5 lr=0.1``."""
        return " ".join(part for part in (self.algorithm, self.problem, self.tuning) if part)

    @cached_property
    def rounds(self) -> list[int]:
        """The recorded rounds that all seeds reached."""
        return sorted(set.intersection(*map(set, self.seeds))) if self.seeds else []

    def values(self, column: str, round_: int) -> list[float]:
        """The value of every seed; empty where the column does not apply."""
        values = [seed[round_][column] for seed in self.seeds]
        return [value for value in values if isinstance(value, int | float)]

    @property
    def status(self) -> GroupStatus:
        """The worst that happened to a seed."""
        found = {job["status"] for job in self.jobs}
        for worst in ("failed", "diverged", "interrupted"):
            if worst in found:
                return worst
        if "running" in found or found > {"pending"}:
            return "unfinished"
        return "pending" if "pending" in found else "stopped" if "stopped" in found else "done"

    @property
    def note(self) -> str:
        """What is not as planned, in words; empty when all seeds are done."""
        notes = []
        unfinished = [job for job in self.jobs if job["status"] in ("running", "pending")]
        several = len(self.jobs) > 1
        for status in ("failed", "diverged", "interrupted", "stopped"):
            stopped = [job["round"] for job in self.jobs if job["status"] == status]
            who = f"{len(stopped)} of {len(self.jobs)} seeds " if several else ""
            if stopped:
                notes.append(f"{who}{status} at round {min(stopped)}")
        if unfinished and several:
            notes.append(f"{len(unfinished)} of {len(self.jobs)} seeds unfinished")
        elif unfinished:
            notes.append(
                "not started"
                if self.status == "pending"
                else f"unfinished, at round {unfinished[0]['round']}"
            )
        return ", ".join(notes)
