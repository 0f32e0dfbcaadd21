"""What a runner runs: jobs and how to build them, whether a file or Python calls describe them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.contract import Method
from holdfast.core.world import World
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.assembly import Setting
from holdfast.experiments.callbacks import JobInfo
from holdfast.experiments.config import Cadence


class PlannedJob(Protocol):
    """One algorithm with one seed at one point of a sweep."""

    @property
    def id(self) -> str:
        """Differs from job to job, and is fit for the name of a file."""

    @property
    def label(self) -> str:
        """The algorithm, as tables and plots call it."""

    @property
    def seed(self) -> int: ...

    @property
    def axes(self) -> Mapping[str, Any]:
        """Dotted key -> value, for what is swept."""

    @property
    def rounds(self) -> int: ...

    @property
    def evaluate_every(self) -> Cadence: ...

    @property
    def checkpoint_every(self) -> int: ...

    @property
    def info(self) -> JobInfo:
        """As callbacks know it."""


class Planned(Protocol):
    """Jobs, and what a run directory says about them."""

    @property
    def name(self) -> str: ...

    @property
    def jobs(self) -> Sequence[Any]:
        """Each a ``PlannedJob``."""

    @property
    def axes(self) -> list[str]:
        """Dotted keys that are swept: columns of the metrics."""

    @property
    def seeds(self) -> list[int]: ...

    @property
    def digest(self) -> str:
        """Identifies the experiment: a checkpoint of another one is refused."""

    @property
    def document(self) -> tuple[str, str]:
        """The file that describes the experiment to people: its name and its text."""

    @property
    def notes(self) -> dict[str, Any]:
        """What else ``summary.json`` says."""

    @property
    def device(self) -> str: ...

    @property
    def data_dir(self) -> Path | None: ...

    @property
    def world(self) -> World: ...

    def changes(self, summary: Mapping[str, Any]) -> str:
        """In what this differs from the run that ``summary`` is of, in words; empty if in nothing."""

    def at_rounds(self, rounds: int) -> Planned:
        """The same with so many rounds."""

    def warnings(self) -> list[str]:
        """What a user should know before the run, though it is no mistake."""

    def setting(self, job: Any) -> Setting:
        """The job's data, model and network."""

    def method(self, job: Any) -> Method:
        """The job's algorithm."""

    def simulation(self, job: Any) -> Simulation:
        """The job, ready to run."""


MOST_KEPT = 2**28  # numbers in the samples of settings that may be used again


class KeptSettings:
    """The last settings that were used, as the seeds of a sweep take turns."""

    def __init__(self) -> None:
        self._kept: dict[str, Setting] = {}  # the latest at the end

    def get(self, key: str, build: Callable[[], Setting]) -> Setting:
        """The setting called ``key``, built if it is not here any more."""
        kept = self._kept
        if key not in kept:
            kept[key] = build()
        kept[key] = kept.pop(key)
        while len(kept) > 1 and sum(setting.data.numbers for setting in kept.values()) > MOST_KEPT:
            del kept[next(iter(kept))]
        return kept[key]
