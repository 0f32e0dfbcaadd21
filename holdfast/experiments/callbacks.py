"""Who watches training: progress bars, loggers, early stopping."""

from __future__ import annotations

from typing import Protocol

from holdfast.engines.common.driver import Row
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.statuses import Outcome


class Stop(Exception):  # noqa: N818 - not an error
    """Raised by a callback to end the job after this round, with status "stopped"; its text says why."""


class Watched(Protocol):
    """What callbacks know about a job: a method with one seed, from ``hf.train`` or an experiment."""

    @property
    def id(self) -> str:
        """Differs from job to job, and is fit for the name of a file."""

    @property
    def title(self) -> str:
        """For people."""

    @property
    def rounds(self) -> int:
        """How many are to be run."""


class Callback:
    """Derive from this and override what you need; ``hf.train(callbacks=[...])`` calls it.

    A callback may raise ``hf.Stop`` to end the job. Any other exception ends training and reaches the caller.
    ``job_ended`` is called however a job ends, so that files and displays can be closed there.
    """

    def job_started(self, job: Watched, simulation: Simulation) -> None:
        """Before the first round, which is ``simulation.round``, unless a job is resumed 0."""

    def job_prepared(self, job: Watched, how: str) -> None:
        """Rounds are about to run; ``how`` says in which way, for people."""

    def row_recorded(self, job: Watched, row: Row) -> None:
        """Metrics were measured: ``row`` has the round, each metric and the costs, by name."""

    def round_done(self, job: Watched, round: int) -> None:
        """So many rounds are done, and what they recorded was told; called with 0 for the initial models."""

    def job_ended(self, job: Watched, outcome: Outcome) -> None:
        """The job is over: ``outcome.status`` says in which way, ``outcome.message`` why."""
