"""A run read back from its directory, and its figures averaged over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, cast

from holdfast.core.errors import HoldfastError, unknown
from holdfast.experiments.record_files import (
    COST_COLUMNS,
    ENDED,
    JobSummary,
    Partition,
    RecordedRow,
    Summary,
    WeightedLink,
    problem_at,
    read_config,
    read_environment,
    read_links,
    read_metrics,
    read_partition,
    read_summary,
    short,
)

# --- the seeds of one algorithm at one point of a sweep, and what became of them together ---------------


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


# --- A run read back from its directory, and its figures averaged over seeds ----------------------------


RECORD_FILES = ("summary.json", "metrics.csv")
SETTING_FILES = ("environment.json", "partition.csv", "network.csv")


class Spread(NamedTuple):
    """A figure over the seeds."""

    mean: float
    std: float | None  # sample standard deviation (divisor seeds - 1); None for one seed, or no finite mean


@dataclass(frozen=True)
class Series:
    """One curve: a metric over the rounds that all seeds of a group reached, and in which it is finite."""

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
    """One line of the table of results: the last round that all seeds reached."""

    label: str  # everything of the next three
    algorithm: str
    tuning: str  # swept values of the algorithm, such as "lr=0.1"
    problem: str  # other swept values, such as "h=0.1"
    contest: str  # the problem in words; only lines that share it are ranked against each other
    seeds: int  # that the figures are taken over
    round: int | None  # None: nothing was recorded
    rounds: int  # planned
    values: dict[str, Spread]  # metrics and costs; NaN: undefined, for some seed at least
    best_accuracy: Spread | None  # of each seed's best recorded round
    status: GroupStatus
    note: str

    def defined(self, metric: str) -> Spread | None:
        """The figure, if there is one and it is finite; others cannot be ranked."""
        spread = self.values.get(metric)
        return spread if spread is not None and math.isfinite(spread.mean) else None


@dataclass(frozen=True)
class RunRecord:
    """Everything that a run directory tells."""

    path: Path
    name: str
    config: dict[str, Any]
    config_text: str  # experiment.toml, or setting.toml of a run from Python, as it stands
    environment: dict[str, Any]
    summary: Summary
    axes: list[str]  # dotted keys that were swept
    metrics: list[str]
    rows: list[RecordedRow]
    partition: Partition | None  # None: a member of a deployed federation, which does not know the others'
    links: list[WeightedLink]
    prefix: str = ""  # tells runs apart where several are shown together; see ``overlaid``
    differing: tuple[str, ...] = ()  # keys of [problem] that are not the same in all of these

    @property
    def member(self) -> str | None:
        """The member of a deployed federation that recorded this; None for a run on one machine."""
        return self.summary.get("member")

    @property
    def origin(self) -> str | None:
        """The function that was called, such as "hf.train"; None for a run of an experiment file."""
        return self.summary.get("origin")

    @cached_property
    def counted_rows(self) -> list[dict[int, RecordedRow]]:
        """For every job, in the order of the summary: round -> row.

        A job that diverged ended with a row that is not finite, which does not count. Elsewhere a figure that
        is not finite is undefined, such as the accuracy of a class that a node has no sample of.
        """
        found: dict[tuple[str, ...], dict[int, RecordedRow]] = {}
        for row in self.rows:
            found.setdefault(_row_key(row, self.axes), {})[cast(int, row["round"])] = row
        counted = [found.get(_job_key(job, self.axes), {}) for job in self.summary["jobs"]]
        for job, rows in zip(self.summary["jobs"], counted, strict=True):
            if job["status"] == "diverged" and rows:
                last = max(rows)
                if not _finite(rows[last][column] for column in [*self.metrics, *COST_COLUMNS]):
                    del rows[last]
        return counted

    @cached_property
    def groups(self) -> list[Group]:
        """Algorithms and points of the sweep, in the order of the jobs.

        Interrupted seeds do not count beside those that ended. Diverged and failed seeds do, and end the
        group's curve: a mean over the survivors alone would flatter.
        """
        members: dict[tuple[str, ...], list[int]] = {}
        for place, job in enumerate(self.summary["jobs"]):
            members.setdefault(_job_key(job, self.axes)[:-1], []).append(place)
        groups = []
        for key, places in members.items():
            jobs = [self.summary["jobs"][place] for place in places]
            ended = [place for place in places if self.summary["jobs"][place]["status"] in ENDED]
            counted = ended or [place for place in places if self.counted_rows[place]]
            problem, tuning = self._swept(key[1:])
            contest = self._contest(jobs[0]) if self.differing else problem
            seeds = [self.counted_rows[place] for place in counted]
            groups.append(Group(self.prefix + key[0], tuning, problem, contest, jobs, counted, seeds))
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
        of_round = {round_: group.values(metric, round_) for round_ in group.rounds}
        rounds = [r for r, found in of_round.items() if len(found) == len(group.seeds) and _finite(found)]
        values = [of_round[round_] for round_ in rounds]
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
            best = _spread([_highest(seed) for seed in zip(*by_round, strict=True)])
        return FinalRow(
            label=group.label,
            algorithm=group.algorithm,
            tuning=group.tuning,
            problem=group.problem,
            contest=group.contest,
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

    def problem_of(self, job: JobSummary) -> dict[str, str]:
        """The keys of [problem] as they were for ``job``, swept ones too, each in a few characters."""
        return problem_at(self.config, job["axes"])

    def _contest(self, job: JobSummary) -> str:
        """Its problem as far as the runs shown together differ in it, and its other swept values."""
        problem = self.problem_of(job)
        of_problem = [f"{key}={problem.get(key, '–')}" for key in self.differing]
        rest = {axis: value for axis, value in job["axes"].items() if axis.split(".")[0] != "problem"}
        others = [f"{axis}={value}" for axis, value in rest.items() if not axis.startswith("algorithm.")]
        return " ".join(of_problem + others)


def load_record(path: Path) -> RunRecord:
    """Reads a run directory, or a deployed member's; the error names whatever is missing or damaged."""
    record = read_record(path)
    jobs = {_job_key(job, record.axes) for job in record.summary["jobs"]}
    for row in record.rows:
        if (key := _row_key(row, record.axes)) not in jobs:
            raise HoldfastError(
                f"{path}: metrics.csv has rows of {' '.join(key)!r}, which summary.json does not know"
            )
    recorded = {(_row_key(row, record.axes), row["round"]) for row in record.rows}
    for job in record.summary["jobs"]:
        key = _job_key(job, record.axes)
        if job["status"] == "done" and (key, job["rounds"]) not in recorded:
            raise HoldfastError(
                f"{path}: metrics.csv is damaged: {' '.join(key)!r} is done, but its last round, "
                f"{job['rounds']}, is not there"
            )
    return record


def read_record(path: Path) -> RunRecord:
    """As ``load_record``, but files of different moments, as a run under way may show them, are no error."""
    if not path.is_dir():
        raise HoldfastError(f"{path} is not a run directory: expected a folder that 'holdfast run' made")
    noted = path / "summary.json"
    told: Mapping[str, Any] = read_summary(noted) if noted.is_file() else {}
    deployed, document = "member" in told, "setting.toml" if "origin" in told else "experiment.toml"
    files = {name: path / name for name in (document, *SETTING_FILES, *RECORD_FILES)}
    for name in RECORD_FILES if deployed else files:
        if not files[name].is_file():
            raise HoldfastError(f"{path} is not a run directory: {name} is missing")
    config, config_text = ({}, "") if deployed else read_config(files[document])
    summary = read_summary(files["summary.json"])
    metrics = read_metrics(files["metrics.csv"])
    return RunRecord(
        path=path,
        name=summary["name"],
        config=config,
        config_text=config_text,
        environment={} if deployed else read_environment(files["environment.json"]),
        summary=summary,
        axes=metrics.axes,
        metrics=metrics.names,
        rows=metrics.rows,
        partition=None if deployed else read_partition(files["partition.csv"]),
        links=[] if deployed else read_links(files["network.csv"]),
    )


def overlaid(records: Sequence[RunRecord]) -> list[RunRecord]:
    """The records as they are shown together: with what tells them apart, where there are several.

    Their labels begin with the run's name, and lines of different problems are not ranked together.
    """
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
    problems = [record.problem_of(job) for record in records for job in record.summary["jobs"]]
    keys = dict.fromkeys(key for problem in problems for key in problem)
    differing = tuple(key for key in keys if len({problem.get(key) for problem in problems}) > 1)
    return [
        replace(record, prefix=f"{name}: ", differing=differing)
        for record, name in zip(records, names, strict=True)
    ]


def _job_key(job: JobSummary, axes: list[str]) -> tuple[str, ...]:
    """Algorithm, swept values, seed."""
    return (job["algorithm"], *(short(job["axes"].get(axis, "")) for axis in axes), str(job["seed"]))


def _row_key(row: RecordedRow, axes: list[str]) -> tuple[str, ...]:
    return (str(row["algorithm"]), *(str(row[axis]) for axis in axes), str(row["seed"]))


def _spread(values: Sequence[float]) -> Spread:
    """Over the seeds; undefined if it is for one of them, as a mean over the others would mislead."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 and _finite(values) else None)


def _finite(values: Iterable[Any]) -> bool:
    """Whether all numbers among ``values`` are."""
    return all(math.isfinite(value) for value in values if isinstance(value, int | float))


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)
