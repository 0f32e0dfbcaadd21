"""Who watches training: progress bars, loggers, early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.statuses import Outcome

Row = dict[str, float]
"""The metrics of a round, and what it has cost so far, by name."""


class Stop(Exception):  # noqa: N818 - not an error
    """Raised by a callback to end the job after this round, with status "stopped"; its text says why."""


@dataclass(frozen=True)
class JobInfo:
    """What callbacks know about a job: a method with one seed, from ``hf.train`` or an experiment."""

    id: str  # differs from job to job, and is fit for the name of a file
    title: str  # for people
    rounds: int


class Callback:
    """Derive from this and override what you need; ``hf.train(callbacks=[...])`` calls it.

    A callback may raise ``hf.Stop`` to end the job. Any other exception ends training and reaches the caller.
    ``job_ended`` is called however a job ends, so that files and displays can be closed there.
    """

    late: ClassVar[bool] = False
    """Whether rows may be told a round late. On a GPU, where all callbacks allow it, rounds do not wait."""

    def job_started(self, job: JobInfo, simulation: Simulation) -> None:
        """Before the first round, which is ``simulation.round``, unless a job is resumed 0."""

    def job_prepared(self, job: JobInfo, how: str) -> None:
        """Rounds are about to run; ``how`` says in which way, for people."""

    def row_recorded(self, job: JobInfo, row: Row) -> None:
        """Metrics were measured: ``row`` has the round, each metric and the costs, by name."""

    def round_done(self, job: JobInfo, round: int) -> None:
        """So many rounds are done, and what they recorded was told; called with 0 for the initial models."""

    def job_ended(self, job: JobInfo, outcome: Outcome) -> None:
        """The job is over: ``outcome.status`` says in which way, ``outcome.message`` why."""
