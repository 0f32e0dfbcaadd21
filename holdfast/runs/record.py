"""A run read back from its directory, and its figures averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, cast

from holdfast.errors import HoldfastError, unknown
from holdfast.metrics.columns import COST_COLUMNS
from holdfast.runs.record_files import (
    Job,
    Link,
    Partition,
    Row,
    Summary,
    read_config,
    read_environment,
    read_links,
    read_metrics,
    read_partition,
    read_summary,
    short,
)
from holdfast.runs.statuses import ENDED

GroupStatus = Literal["done", "diverged", "failed", "interrupted", "unfinished", "pending"]


class Spread(NamedTuple):
    """A figure over the seeds."""

    mean: float
    std: float | None  # sample standard deviation (divisor seeds - 1); None for a single seed


@dataclass(frozen=True)
class Series:
    """One curve: a metric over the rounds that all seeds of a group reached; empty if it does not apply."""

    label: str
    x: list[float]
    mean: list[float]
    low: list[float]  # the lowest seed
    high: list[float]  # the highest seed
    seeds: int = 1
    diverged: bool = False
    note: str = ""  # what is not as planned, such as "diverged at round 12"


@dataclass(frozen=True)
class FinalRow:
    """One line of the table of results: the last round that all seeds reached with finite figures."""

    label: str  # everything of the next three
    algorithm: str
    tuning: str  # swept values of the algorithm, such as "lr=0.1"
    problem: str  # other swept values, such as "h=0.1": only lines that share them compare
    seeds: int  # that the figures are taken over
    round: int | None  # None: nothing was recorded
    rounds: int  # planned
    values: dict[str, Spread]  # metrics and costs
    best_accuracy: Spread | None  # of each seed's best recorded round
    status: GroupStatus
    note: str


@dataclass(frozen=True)
class Group:
    """All seeds of one algorithm at one point of the sweep: one curve, one line of the table."""

    algorithm: str
    tuning: str  # as in FinalRow
    problem: str
    jobs: list[Job]
    seeds: list[dict[int, Row]]  # for every seed that counts: round -> row; finite rows only

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
        if len(found) > 1 or "running" in found:
            return "unfinished"
        return "done" if "done" in found else "pending"

    @property
    def note(self) -> str:
        """What is not as planned, in words; empty when all seeds are done."""
        notes = []
        unfinished = [job for job in self.jobs if job["status"] in ("running", "pending")]
        several = len(self.jobs) > 1
        for status in ("failed", "diverged", "interrupted"):
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


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run directory tells."""

    path: Path
    name: str
    config: dict[str, Any]
    config_text: str  # experiment.toml as it stands
    environment: dict[str, Any]
    summary: Summary
    axes: list[str]  # dotted keys that were swept
    metrics: list[str]
    rows: list[Row]
    partition: Partition
    links: list[Link]
    prefix: str = ""  # tells runs apart where several are shown together; see ``overlaid``

    @cached_property
    def groups(self) -> list[Group]:
        """Algorithms and points of the sweep, in the order of the jobs.

        Interrupted seeds do not count beside those that ended. Diverged and failed seeds do, and end the
        group's curve: a mean over the survivors alone would flatter.
        """
        recorded: dict[tuple[str, ...], dict[int, Row]] = {}
        for row in self.rows:
            figures = [row[column] for column in [*self.metrics, *COST_COLUMNS]]
            if all(math.isfinite(figure) for figure in figures if isinstance(figure, int | float)):
                recorded.setdefault(_row_key(row, self.axes), {})[cast(int, row["round"])] = row
        jobs: dict[tuple[str, ...], list[Job]] = {}
        for job in self.summary["jobs"]:
            jobs.setdefault(_job_key(job, self.axes)[:-1], []).append(job)
        groups = []
        for key, members in jobs.items():
            ended = [job for job in members if job["status"] in ENDED]
            started = [job for job in members if _job_key(job, self.axes) in recorded]
            seeds = [recorded.get(_job_key(job, self.axes), {}) for job in ended or started]
            problem, tuning = self._swept(key[1:])
            groups.append(Group(self.prefix + key[0], tuning, problem, members, seeds))
        return groups

    def series(self, metric: str, axis: str = "round") -> list[Series]:
        """One curve per group: ``metric`` (mean and extent over seeds) against ``axis`` (mean over seeds)."""
        columns = ["round", *self.metrics, *COST_COLUMNS]
        for column in (metric, axis):
            if column not in columns:
                raise unknown("metric", column, columns)
        return [self._curve(group, metric, axis) for group in self.groups]

    def final_table(self) -> list[FinalRow]:
        """One line per group."""
        return [self._final(group) for group in self.groups]

    def _curve(self, group: Group, metric: str, axis: str) -> Series:
        rounds = [round_ for round_ in group.rounds if group.values(metric, round_)]
        values = [group.values(metric, round_) for round_ in rounds]
        return Series(
            label=group.label,
            x=[fmean(group.values(axis, round_)) for round_ in rounds],
            mean=[fmean(seeds) for seeds in values],
            low=[min(seeds) for seeds in values],
            high=[max(seeds) for seeds in values],
            seeds=len(group.seeds),
            diverged=group.status == "diverged",
            note=group.note,
        )

    def _final(self, group: Group) -> FinalRow:
        values: dict[str, Spread] = {}
        best = None
        if group.rounds:
            last, columns = group.rounds[-1], [*self.metrics, *COST_COLUMNS]
            found = {column: group.values(column, last) for column in columns}
            values = {column: _spread(seeds) for column, seeds in found.items() if seeds}
        if "test_accuracy" in values:
            by_round = [group.values("test_accuracy", round_) for round_ in group.rounds]
            best = _spread([max(seed) for seed in zip(*by_round, strict=True)])
        return FinalRow(
            label=group.label,
            algorithm=group.algorithm,
            tuning=group.tuning,
            problem=group.problem,
            seeds=len(group.seeds),
            round=group.rounds[-1] if group.rounds else None,
            rounds=group.jobs[0]["rounds"],
            values=values,
            best_accuracy=best,
            status=group.status,
            note=group.note,
        )

    def _swept(self, values: Sequence[str]) -> tuple[str, str]:
        """Swept values of problem and network, and of the algorithm, under the short names of their keys."""
        last = [axis.rsplit(".", 1)[-1] for axis in self.axes]
        names = [end if last.count(end) == 1 else axis for end, axis in zip(last, self.axes, strict=True)]
        shown = [
            (axis, f"{name}={value}")
            for axis, name, value in zip(self.axes, names, values, strict=True)
            if value
        ]
        tuning = [text for axis, text in shown if axis.startswith("algorithm.")]
        return " ".join(text for _, text in shown if text not in tuning), " ".join(tuning)


def load_record(path: Path) -> RunRecord:
    """Reads a run directory; whatever is missing or damaged in it is named in the error."""
    files = {
        name: path / name
        for name in (
            "experiment.toml",
            "environment.json",
            "summary.json",
            "metrics.csv",
            "partition.csv",
            "network.csv",
        )
    }
    if not path.is_dir():
        raise HoldfastError(f"{path} is not a run directory: expected a folder that 'holdfast run' made")
    for name, file in files.items():
        if not file.is_file():
            raise HoldfastError(f"{path} is not a run directory: {name} is missing")
    config, config_text = read_config(files["experiment.toml"])
    summary = read_summary(files["summary.json"])
    metrics = read_metrics(files["metrics.csv"])
    jobs = {_job_key(job, metrics.axes) for job in summary["jobs"]}
    for row in metrics.rows:
        if (key := _row_key(row, metrics.axes)) not in jobs:
            raise HoldfastError(
                f"{path}: metrics.csv has rows of {' '.join(key)!r}, which summary.json does not know"
            )
    recorded = {(_row_key(row, metrics.axes), row["round"]) for row in metrics.rows}
    for job in summary["jobs"]:
        key = _job_key(job, metrics.axes)
        if job["status"] == "done" and (key, job["rounds"]) not in recorded:
            raise HoldfastError(
                f"{path}: metrics.csv is damaged: {' '.join(key)!r} is done, but its last round, "
                f"{job['rounds']}, is not there"
            )
    return RunRecord(
        path=path,
        name=summary["name"],
        config=config,
        config_text=config_text,
        environment=read_environment(files["environment.json"]),
        summary=summary,
        axes=metrics.axes,
        metrics=metrics.names,
        rows=metrics.rows,
        partition=read_partition(files["partition.csv"]),
        links=read_links(files["network.csv"]),
    )


def overlaid(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records with labels that tell them apart: prefixed by the run's name where there are several."""
    if not records:
        raise HoldfastError("no run is given: name at least one run directory")
    if len(records) == 1:
        return list(records)
    paths = [record.path.resolve() for record in records]
    for record, path in zip(records, paths, strict=True):
        if paths.count(path) > 1:
            raise HoldfastError(f"{record.path} is given twice: name every run once")
    candidates = (
        [record.name for record in records],
        [path.name for path in paths],
        [str(path) for path in paths],
    )
    names = next(names for names in candidates if len(set(names)) == len(names))
    return [replace(record, prefix=f"{name}: ") for record, name in zip(records, names, strict=True)]


def _job_key(job: Job, axes: list[str]) -> tuple[str, ...]:
    """Algorithm, swept values, seed."""
    return (job["algorithm"], *(short(job["axes"].get(axis, "")) for axis in axes), str(job["seed"]))


def _row_key(row: Row, axes: list[str]) -> tuple[str, ...]:
    return (str(row["algorithm"]), *(str(row[axis]) for axis in axes), str(row["seed"]))


def _spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None)
