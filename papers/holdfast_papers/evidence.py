"""What claims look at: recorded runs and computed tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np
from scipy.special import stdtr

from holdfast.core.errors import HoldfastError, unknown
from holdfast.experiments.record import Group, RunRecord
from holdfast.experiments.record_files import short

TableRow = dict[str, Any]  # one line of a computed table
Scale = Literal["small", "full"]


@dataclass(frozen=True)
class Curve:
    """All seeds of one algorithm at one point of the sweep. Arrays have one entry per seed.

    What is asked of a curve that diverged or failed is an error: it has no last value.
    """

    group: Group

    @property
    def name(self) -> str:
        return self.group.label

    @property
    def algorithm(self) -> str:
        """Its label in the preset, whatever its setting."""
        return self.group.jobs[0]["algorithm"]

    @property
    def broke_off(self) -> bool:
        """Whether a seed diverged or failed."""
        return self.group.status in ("diverged", "failed")

    @property
    def rounds(self) -> np.ndarray:
        """The recorded rounds that all seeds reached, [rounds]."""
        return np.array(self.group.rounds)

    def path(self, column: str) -> np.ndarray:
        """``column`` at ``rounds``, [seeds, rounds]."""
        self._expect_all_rounds()
        return np.array([[_number(seed[r], column) for r in self.group.rounds] for seed in self.group.seeds])

    def final(self, column: str) -> np.ndarray:
        """The last recorded value of every seed."""
        return self._of_each_seed(lambda seed: _number(seed[max(seed)], column))

    def best(self, column: str) -> np.ndarray:
        """The highest recorded value of every seed."""
        return self._of_each_seed(lambda seed: max(_number(row, column) for row in seed.values()))

    def lowest(self, column: str) -> np.ndarray:
        """The lowest recorded value of every seed."""
        return self._of_each_seed(lambda seed: min(_number(row, column) for row in seed.values()))

    def at(self, column: str, x: float, of: str = "round") -> np.ndarray:
        """``column`` where ``of``, which never falls, is last at most ``x``, such as round 10."""

        def value(seed: Mapping[int, Mapping[str, Any]]) -> float:
            reached = [r for r in sorted(seed) if _number(seed[r], of) <= x]
            if not reached:
                raise HoldfastError(f"{self.name}: nothing was recorded up to {of} = {x:g}")
            return _number(seed[reached[-1]], column)

        return self._of_each_seed(value)

    def first(self, of: str, column: str, low: float = -np.inf, high: float = np.inf) -> np.ndarray:
        """The first ``of`` (such as round) at which low <= ``column`` <= high; inf if never."""

        def value(seed: Mapping[int, Mapping[str, Any]]) -> float:
            rows = (seed[r] for r in sorted(seed))
            return next((_number(row, of) for row in rows if low <= _number(row, column) <= high), np.inf)

        return self._of_each_seed(value)

    def _expect_all_rounds(self) -> None:
        if self.group.status != "done":
            raise HoldfastError(f"{self.name}: {self.group.note}")

    def _of_each_seed(self, value: Callable[[Mapping[int, Mapping[str, Any]]], float]) -> np.ndarray:
        self._expect_all_rounds()
        return np.array([value(seed) for seed in self.group.seeds])


class MissingRunError(HoldfastError):
    """What is asked for was not run, or not to its end."""


@dataclass(frozen=True)
class Evidence:
    """The runs of an experiment by the name of their preset, and the lines of its computed table."""

    scale: Scale
    runs: Mapping[str, RunRecord]
    rows: Sequence[TableRow] = ()
    partial: bool = False  # more was planned than was run: a curve may be missing

    @property
    def full(self) -> bool:
        return self.scale == "full"

    def curve(self, algorithm: str, /, preset: str = "", **where: Any) -> Curve:
        """The curve of an algorithm (by its label) where the swept keys have these values.

        Keys are named by their last part: ``evidence.curve("gossip", lr=0.05, h=0.1)``.
        """
        found = [curve for curve in self.curves(preset, **where) if curve.algorithm == algorithm]
        if not found and self.partial:
            raise MissingRunError(f"{algorithm} {where} of {preset or 'the preset'} was not run")
        if len(found) != 1:
            record = self.run(preset)
            labels = [group.label for group in record.groups]
            raise HoldfastError(
                f"{record.path}: {len(found)} curves match {algorithm!r} {where}, expected one; there are "
                f"{', '.join(labels)}"
            )
        return found[0]

    def curves(self, preset: str = "", **where: Any) -> list[Curve]:
        """All curves of a preset where the swept keys have these values."""
        groups = self.run(preset).groups
        return [Curve(group) for group in groups if all(_has(group, key, where[key]) for key in where)]

    def swept(self, key: str, preset: str = "") -> list[str]:
        """The values of a swept key, as text, in their order."""
        groups = self.run(preset).groups
        return list(dict.fromkeys(value for group in groups if (value := _swept(group, key)) is not None))

    def run(self, preset: str = "") -> RunRecord:
        """The run of ``preset``; without a name the only one there is."""
        if not preset and len(self.runs) == 1:
            return next(iter(self.runs.values()))
        if preset not in self.runs and self.partial:
            raise MissingRunError(f"{preset or 'a preset'} was not run")
        if preset not in self.runs:
            raise unknown("preset", preset, self.runs)
        return self.runs[preset]

    def paired(self, *presets: str) -> Evidence:
        """These presets with the seeds that all of them have: where runs are not finished, some have more."""
        runs = {preset: self.run(preset) for preset in presets}
        seeds = set.intersection(*({job["seed"] for job in run.summary["jobs"]} for run in runs.values()))
        kept = {
            preset: [job for job in run.summary["jobs"] if job["seed"] in seeds]
            for preset, run in runs.items()
        }
        return replace(
            self, runs={p: replace(run, summary={**run.summary, "jobs": kept[p]}) for p, run in runs.items()}
        )

    def rows_where(self, **where: Any) -> list[TableRow]:
        """The lines of the computed table whose columns have these values."""
        return [row for row in self.rows if all(row[key] == where[key] for key in where)]

    def column(self, column: str, /, **where: Any) -> np.ndarray:
        """A column of ``rows_where``, [lines]."""
        return np.array([row[column] for row in self.rows_where(**where)])


def mean_text(values: np.ndarray | Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Mean and sample standard deviation, such as ``82.91 ± 0.32 %``; a single or an infinite value alone."""
    numbers = [float(value) for value in values]
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 and np.isfinite(numbers).all() else ""
    return f"{fmean(numbers):.{digits}f}{spread}{unit and ' '}{unit}"


def mean_texts(values: Mapping[str, np.ndarray], digits: int = 2) -> str:
    """Several means by name, such as ``fedpd 1.20 ± 0.10, fedprox 0.50 ± 0.08``."""
    return ", ".join(f"{name} {mean_text(seeds, digits)}" for name, seeds in values.items())


def scientific_text(values: np.ndarray | Sequence[float], digits: int = 1) -> str:
    """The median and the extent, such as ``1.2e-09 (8.0e-10 to 3.1e-09)``; a single value alone."""
    numbers = [float(value) for value in values]
    extent = f" ({min(numbers):.{digits}e} to {max(numbers):.{digits}e})" if len(numbers) > 1 else ""
    return f"{float(np.median(numbers)):.{digits}e}{extent}"


def sureness(margin: np.ndarray) -> str:
    """In how many seeds ``margin``, [seeds], is positive, with p of a t-test: ``5 of 5 seeds, p = 0.003``.

    p is how often chance alone would put the mean as far from zero, on the side where it is. From 0.05 on
    the words are "not sure".
    """
    count = f"{int((margin > 0).sum())} of {len(margin)} seeds"
    if len(margin) == 1:
        return "one seed"
    if not np.isfinite(margin).all():
        return count
    spread = margin.std(ddof=1) / np.sqrt(len(margin))
    p = float(stdtr(len(margin) - 1, -abs(margin.mean()) / spread)) if spread else 0.0
    return f"{count}, {'p < 0.001' if p < 1e-3 else f'p = {p:.2g}'}{', not sure' if p >= 0.05 else ''}"


def fitted_power(x: np.ndarray | Sequence[float], y: np.ndarray | Sequence[float]) -> float:
    """p of the fit y = c x^p."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _swept(group: Group, key: str) -> str | None:
    """The value of the swept key that ends in ``key``; None if the group has none."""
    for axis, value in group.jobs[0]["axes"].items():
        if axis == key or axis.endswith(f".{key}"):
            return short(value)
    return None


def _has(group: Group, key: str, wanted: Any) -> bool:
    value = _swept(group, key)
    if value is None:
        return False
    try:
        return float(value) == float(wanted)
    except (TypeError, ValueError):
        return value == short(wanted)


def _number(row: Mapping[str, Any], column: str) -> float:
    if column not in row:
        raise unknown("column", column, row)
    value = row[column]
    return float("nan") if value is None else float(value)
