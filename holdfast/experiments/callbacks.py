"""Who watches training: progress bars, loggers, early stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.errors import HoldfastError, did_you_mean
from holdfast.core.validation import Count, NonNegative, check
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.record_files import Mode, Outcome, better, check_choosing

Measurements = dict[str, float]
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
    ``on_train_end`` is called however a job ends, so that files and displays can be closed there.
    """

    late: ClassVar[bool] = False
    """Whether rows may be told a round late. On a GPU, where all callbacks allow it, rounds do not wait."""

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        """Before the first round, which is ``simulation.round``, unless a job is resumed 0."""

    def on_resume(self, job: JobInfo, rows: Sequence[Measurements]) -> None:
        """A resumed job goes on: ``rows`` are those that were recorded before, the first one first."""

    def on_prepared(self, job: JobInfo, how: str) -> None:
        """Rounds are about to run; ``how`` says in which way, for people."""

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        """Metrics were measured: ``row`` has the round, each metric and the costs, by name."""

    def on_round(self, job: JobInfo, round: int) -> None:
        """So many rounds are done, and what they recorded was told; called with 0 for the initial models."""

    def on_train_end(self, job: JobInfo, outcome: Outcome) -> None:
        """The job is over: ``outcome.status`` says in which way, ``outcome.message`` why."""


class EarlyStopping(Callback):
    """Ends a job when ``metric`` has not improved in ``patience`` measurements in a row.

    An improvement is one by more than ``min_delta``. ``mode``: whether the metric should rise ("max") or fall
    ("min"); metrics of holdfast know that themselves. A resumed job remembers what it measured before. In a
    private run the metric must not be one of the training data.
    """

    def __init__(
        self,
        metric: str = "train_loss",
        patience: int = 5,
        *,
        min_delta: float = 0.0,
        mode: Mode | None = None,
    ) -> None:
        check("patience", Count, patience)
        check("min_delta", NonNegative, float(min_delta))
        self.metric, self.patience, self.min_delta = metric, patience, float(min_delta)
        self.sign = 1.0 if better(metric, mode) == "max" else -1.0
        self.best, self.waited = -math.inf, 0

    def __repr__(self) -> str:
        return f"EarlyStopping({self.metric!r}, patience={self.patience}, min_delta={self.min_delta:g})"

    def on_train_begin(self, job: JobInfo, simulation: Simulation) -> None:
        if simulation.private:
            check_choosing(self.metric, "EarlyStopping")
        self.best, self.waited = -math.inf, 0

    def on_resume(self, job: JobInfo, rows: Sequence[Measurements]) -> None:
        for row in rows:
            self._look(row)
        self._judge()  # the last round of a run that is extended ends nothing by itself

    def on_evaluate(self, job: JobInfo, row: Measurements) -> None:
        self._look(row)
        self._judge()

    def _judge(self) -> None:
        if self.waited >= self.patience:
            best = self.sign * self.best
            raise Stop(f"{self.metric} has not improved on {best:.4g} in {self.waited} measurements")

    def _look(self, row: Measurements) -> None:
        if self.metric not in row:
            hint = did_you_mean(self.metric, row)
            raise HoldfastError(
                f"EarlyStopping: no metric {self.metric!r} is recorded; there are {', '.join(row)}"
                f"{hint and '; '}{hint.rstrip()}"
            )
        value = self.sign * row[self.metric]
        if value > self.best + self.min_delta:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
