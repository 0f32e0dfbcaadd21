"""What a paper is made of: experiments with their presets, claims and figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError, unknown
from holdfast_papers.evidence import Evidence, Scale, TableRow, sureness


class Verdict(StrEnum):
    """What became of a claim. Only PASS and FAIL count: they judge what a paper claims, tested fairly."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_COMPARABLE = "NOT COMPARABLE"  # the run at hand cannot decide it
    ERRATUM = "ERRATUM"  # a printed statement that a derivation or a counterexample refutes
    HOLDS = "OURS: HOLDS"  # a statement of ours, such as a second reading
    FAILS = "OURS: FAILS"


class Finding(NamedTuple):
    """What a claim's check found."""

    verdict: Verdict
    ours: str  # our figure, with mean and spread over seeds where there are several
    reason: str  # what was asked for, or why it cannot be compared
    sure: str = ""  # in how many seeds it is so, and how likely chance alone would do the same


def judged(holds: bool, ours: str, needed: str) -> Finding:
    """PASS or FAIL where chance plays no part; ``needed`` says in a few words what was asked for."""
    return Finding(Verdict.PASS if holds else Verdict.FAIL, ours, needed)


def judged_by_seeds(margins: Sequence[np.ndarray], ours: str, needed: str) -> Finding:
    """PASS if the mean over the seeds is positive of each of ``margins``, [seeds] each, and how sure that is.

    A margin is by how much a condition is met, such as own - rival. Seeds are paired: entry s of every margin
    comes from seed s. How sure the verdict is, is said of the margin with the smallest mean. What is not a
    number, such as a ratio of two delays that are never reached, does not meet its condition.
    """
    known = [np.where(np.isnan(margin), -np.inf, margin) for margin in margins]
    weakest = min(known, key=lambda margin: float(margin.mean()))
    return judged(bool(weakest.mean() > 0), ours, needed)._replace(sure=sureness(weakest))


def not_comparable(ours: str, why: str) -> Finding:
    """A claim that this run cannot decide."""
    return Finding(Verdict.NOT_COMPARABLE, ours, why)


Kind = Literal["paper", "erratum", "ours"]

WORDS: Mapping[tuple[Kind, Verdict], Verdict] = {  # what PASS and FAIL of other kinds of claims are called
    ("erratum", Verdict.FAIL): Verdict.ERRATUM,
    ("ours", Verdict.PASS): Verdict.HOLDS,
    ("ours", Verdict.FAIL): Verdict.FAILS,
}


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and how to see whether it holds."""

    says: str  # in our own words
    paper: str  # the paper's figure, as text
    check: Callable[[Evidence], Finding]
    kind: Kind = "paper"  # erratum: printed, but refuted; ours: not the paper's, or not counted as such


@dataclass(frozen=True)
class Preset:
    """An experiment file of the paper's folder, and what is changed in it at small scale."""

    file: str  # without .toml; also the key of its run in ``Evidence.runs``
    small: Sequence[str] = ()  # key.path=value, as on the command line


class Line(NamedTuple):
    """A curve of a panel: one algorithm of a preset (by default of the only one) at a point of its sweep."""

    name: str  # in the legend
    algorithm: str  # the label in the preset; of a computed table, the value of the panel's ``by`` column
    where: Mapping[str, Any] = {}  # last part of swept keys -> value
    preset: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``x`` is a column, or the last part of a swept key: then y is every run's last."""

    title: str
    lines: Sequence[Line]
    x: str = "round"
    y: str = "test_accuracy"
    x_label: str = ""  # by default the words for x
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    by: str = ""  # only for a computed table: the column whose values are the lines' ``algorithm``
    each: str = ""  # a swept key: every line is drawn once for each of its values
    common_x: bool = False  # the axis ends where the first of the lines does
    best: bool = False  # along a swept key: each run's best value instead of its last
    slope: bool = False  # of a computed table on logarithmic axes: the legend says every line's slope


@dataclass(frozen=True)
class Layout:
    """A figure as the paper lays it out: panels in rows of ``columns``."""

    panels: Sequence[Panel]
    columns: int = 3


class Circumstances(NamedTuple):
    """What a computation may depend on."""

    scale: Scale
    device: str
    data_dir: Path | None


Table = tuple[list[str], list[list[str]]]  # header, lines


@dataclass(frozen=True)
class PaperExperiment:
    """A table, figure or theorem of a paper: runs of presets, a computed table, or both."""

    id: str  # such as "table-3"
    title: str
    claims: Sequence[Claim]
    presets: Sequence[Preset] = ()
    compute: Callable[[Circumstances], list[TableRow]] | None = None  # takes seconds: always computed again
    layout: Layout | None = None
    table: Callable[[Evidence], Table] | None = None  # where the paper has a table
    note: str = ""  # what a reader must know, such as what even the full scale leaves out

    def __post_init__(self) -> None:
        if not self.presets and self.compute is None:
            raise HoldfastError(f"experiment {self.id!r} has neither presets nor a computation")


@dataclass(frozen=True)
class Paper:
    """A paper with its experiments; the presets lie in ``folder``."""

    id: str  # such as "local-gecl"
    title: str
    reference: str
    folder: Path
    experiments: Sequence[PaperExperiment] = field(default_factory=list)

    def experiment(self, id: str) -> PaperExperiment:
        for experiment in self.experiments:
            if experiment.id == id:
                return experiment
        raise unknown(f"experiment of {self.id}", id, [experiment.id for experiment in self.experiments])

    def preset_path(self, preset: Preset) -> Path:
        return self.folder / f"{preset.file}.toml"
