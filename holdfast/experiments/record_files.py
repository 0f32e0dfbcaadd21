"""The files of a run directory that reports are made from: their shapes, and reading them with care."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from holdfast.core.errors import HoldfastError, did_you_mean

# --- the columns of ``metrics.csv`` beside the metrics, and which way a metric is better ----------------


COST_COLUMNS = [
    "payload_bytes",
    "payload_bytes_per_link",
    "gradient_evaluations",
    "sample_gradients",
    "seconds",
]
MEMBER_COLUMNS = ["wire_bytes_sent", "wire_bytes_received", "waiting_seconds"]  # in a deployed federation
DELAY_COLUMNS = ["tau_proc", "tau_trans", "tau_total", "tau_raw"]  # where nodes or links are sporadic
SOLVER_COLUMNS = ["value_evaluations", "unfinished_solves"]  # for methods with a local solver
EPSILON_COLUMN = "epsilon"  # spent by the node that spent most, where samples are private

Mode = Literal["max", "min"]
"""Whether more or less of a metric is better."""

FALLING = (
    *("consensus", "grad_norm2", "stationarity", "rel_energy"),
    *("optimum_distance", "dual_error", "unfinished_solves"),
)
OF_TRAINING = (  # computed from training data, not from models and test samples alone
    *("train_loss", "minibatch_loss", "grad_norm2", "stationarity", "rel_energy"),
    *("optimum_distance", "dual_error"),
)
ONE_OF_SEVERAL = r"_(node|class)\d+$"  # the end of a column's name, such as that of accuracy_node3


def better(metric: str, mode: Mode | None) -> Mode:
    """``mode``, or what is known of the metric."""
    if (chosen := checked_mode(mode)) is not None:
        return chosen
    figure = re.sub(ONE_OF_SEVERAL, "", metric)
    if figure.endswith("accuracy"):
        return "max"
    if figure in FALLING or figure.endswith("loss"):
        return "min"
    known = (*FALLING, "train_loss", "minibatch_loss", "test_accuracy", "worst_accuracy", "average_accuracy")
    hint = did_you_mean(metric, known)
    hint += "If not, " if hint else ""
    raise HoldfastError(f"metric {metric!r}: {hint}say mode='max' if it should rise, or mode='min'")


def check_choosing(metric: str, who: str) -> None:
    """Refuses to have ``who`` choose by a ``metric`` of training data that are private."""
    if re.sub(ONE_OF_SEVERAL, "", metric) in OF_TRAINING:
        raise HoldfastError(
            f"private: {who} would choose by {metric}, which is computed from private data without noise, "
            "and the choice gives them away; take a metric of test samples that are not private"
        )


def checked_mode(mode: str | None) -> Mode | None:
    """``mode``, if it is one."""
    if mode in (None, "max", "min"):
        return cast("Mode | None", mode)
    raise HoldfastError(f"mode: should be 'max' or 'min', got {mode!r}")


# --- what can become of a job, and which jobs a resumed run leaves alone --------------------------------


JobStatus = Literal["done", "stopped", "diverged", "failed", "interrupted", "running", "pending"]
"""As in ``summary.json`` and in the results of ``hf.train`` and ``hf.minimize``.

``done``: all rounds were run. ``stopped``: a callback ended the job early. ``diverged``: a figure became
infinite or NaN, which ends the job, or grew without bound until the last round (see ``growth``). ``failed``:
an error ended the job, and its ``message`` says which. ``interrupted``: the user or the system asked it to
stop. ``running``: under way, or killed.
"""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: JobStatus
    message: str = ""  # why, in one line; empty if that goes without saying
    error: HoldfastError | None = None  # what made it fail, if we know such errors


SETTLED = ("done", "stopped", "diverged")
"""Running these again would give the same, so ``holdfast resume`` leaves them alone."""

ENDED = (*SETTLED, "failed")
"""What made a job fail may be mended by now, so ``holdfast resume`` tries failed jobs again."""


def status_counts(jobs: Sequence[Mapping[str, Any]]) -> str:
    """How many jobs have each status, such as ``of 5 jobs, 3 done, 1 failed, 1 not started``."""
    words = {
        "done": "done",
        "stopped": "stopped early",
        "diverged": "diverged",
        "failed": "failed",
        "interrupted": "interrupted",
        "running": "unfinished",
        "pending": "not started",
    }
    counted = [(sum(job["status"] == status for job in jobs), word) for status, word in words.items()]
    listed = ", ".join(f"{count} {word}" for count, word in counted if count)
    return f"of {len(jobs)} job{'s' if len(jobs) > 1 else ''}, {listed}"


# --- the files of a run directory that reports are made from --------------------------------------------


# The columns of metrics.csv: algorithm, seed, the swept keys, round, the metrics, then these.

RecordedRow = dict[str, float | int | str | None]
WeightedLink = tuple[int, int, float]  # i, j, weight, with i < j


class JobSummary(TypedDict):
    """One algorithm at one point of the sweep with one seed."""

    id: NotRequired[str]  # the name of its files; a deployed member has none
    algorithm: str
    seed: int
    axes: dict[str, Any]
    status: JobStatus
    round: int
    rounds: int
    seconds: float
    final: NotRequired[dict[str, float]]  # the figures of the last measured round
    message: NotRequired[str]  # of a job that diverged or failed: why, in one line


class Summary(TypedDict):
    """The content of ``summary.json``."""

    name: str
    status: Literal["complete", "interrupted", "running"]
    jobs: list[JobSummary]
    facts: dict[str, Any]
    member: NotRequired[str]  # of a deployed federation: it knows its own share of the run only
    origin: NotRequired[str]  # of a run from Python, such as "hf.train"; nothing can be run from its files
    digest: NotRequired[str]
    device: NotRequired[str]
    data_dir: NotRequired[str | None]


@dataclass(frozen=True)
class Partition:
    """What each node owns."""

    names: list[str] | None  # what the nodes are called; None: by their numbers
    samples: np.ndarray  # [n] int64
    classes: list[str]  # empty for regression
    counts: np.ndarray  # [n, classes] int64


@dataclass(frozen=True)
class Metrics:
    """The content of ``metrics.csv``."""

    axes: list[str]  # dotted keys that were swept
    names: list[str]
    rows: list[RecordedRow]


def short(value: Any) -> str:
    """A swept value in a few characters, for ``metrics.csv`` and labels: a choice by name and parameters."""
    if isinstance(value, dict):
        inner = ",".join(f"{key}={short(part)}" for key, part in value.items() if key != "name")
        return f"{value.get('name', '')}({inner})" if inner else str(value.get("name", ""))
    return str(value)


def problem_at(config: dict[str, Any], axes: dict[str, Any]) -> dict[str, str]:
    """The keys of [problem] at one point of a sweep, each in a few characters."""
    return {
        key: short(_at(value, f"problem.{key}", axes)) for key, value in config.get("problem", {}).items()
    }


def _at(value: Any, key: str, axes: dict[str, Any]) -> Any:
    """``value``, which stands under ``key`` of an experiment, at one point of the sweep over ``axes``."""
    if key in axes and isinstance(value, list):
        return next((element for element in value if short(element) == short(axes[key])), axes[key])
    if isinstance(value, dict):
        return {name: _at(inner, f"{key}.{name}", axes) for name, inner in sorted(value.items())}
    return value


def read_config(file: Path) -> tuple[dict[str, Any], str]:
    """The experiment, and its text."""
    text = _text(file)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise _damaged(file, error) from None


def read_summary(file: Path) -> Summary:
    """What became of every job."""
    summary: Summary = _json(file, Summary)
    return summary


def read_environment(file: Path) -> dict[str, Any]:
    """Versions, machine, commit."""
    environment: dict[str, Any] = _json(file, dict[str, Any])
    return environment


def read_metrics(file: Path) -> Metrics:
    """All recorded rows; an empty cell is None, a swept value stays text.

    A last line without its end was being written when the run was killed, and does not count.
    """
    return metrics_in(file, _text(file))


def metrics_in(file: Path, text: str) -> Metrics:
    """As ``read_metrics``, from the ``text`` of the file."""
    header, lines = _csv(file, text[: text.rfind("\n") + 1])
    at = header.index("round") if "round" in header else 0
    axes, names = header[2:at], header[at + 1 : -len(COST_COLUMNS)]
    as_expected = ["algorithm", "seed", *axes, "round", *names, *COST_COLUMNS]
    if header != as_expected or len(set(header)) < len(header):
        raise _damaged(file, "its first line is not the header of a table of metrics")
    rows: list[RecordedRow] = []
    seen = set()
    for where, cells in lines:
        row: RecordedRow = {
            column: cell if column in ("algorithm", *axes) else number(where, column, cell)
            for column, cell in zip(header, cells, strict=True)
        }
        for column in ("seed", "round"):
            if not isinstance(row[column], int):
                raise _damaged(where, f"{column} should be a whole number, got {row[column]!r}")
        if (key := tuple(cells[: at + 1])) in seen:
            raise _damaged(where, "this round of this job stands there twice")
        seen.add(key)
        rows.append(row)
    return Metrics(axes, names, rows)


def read_partition(file: Path) -> Partition:
    """Samples of every node, in all and per class."""
    header, lines = _csv(file, _text(file))
    names = None
    if header[1:2] == ["name"]:
        header.pop(1)
        names = [cells.pop(1) for _, cells in lines]
    if header[:2] != ["node", "samples"]:
        raise _damaged(file, "its first line should begin with node,samples or node,name,samples")
    rows = [[_whole(where, *cell) for cell in zip(header, cells, strict=True)] for where, cells in lines]
    if not rows or [row[0] for row in rows] != list(range(len(rows))):
        raise _damaged(file, "expected one line for every node, from 0 on")
    table = np.array(rows, dtype=np.int64)
    return Partition(names, table[:, 1], header[2:], table[:, 2:])


def read_links(file: Path) -> list[WeightedLink]:
    """The undirected links of the network; none for a server."""
    header, lines = _csv(file, _text(file))
    if header != ["i", "j", "weight"]:
        raise _damaged(file, "its first line should be i,j,weight")
    links = []
    for where, (i, j, cell) in lines:
        weight = number(where, "weight", cell)
        if weight is None:
            raise _damaged(where, "the weight is missing")
        links.append((_whole(where, "i", i), _whole(where, "j", j), float(weight)))
    return links


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise HoldfastError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _damaged(file, "it is not text") from None


def _json(file: Path, shape: Any) -> Any:
    try:
        value = json.loads(_text(file))
        TypeAdapter(shape).validate_python(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _damaged(file, error) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(file, ": ".join([*map(str, first["loc"]), first["msg"]])) from None
    return value


def _csv(file: Path, text: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The header, then each other line, as long as the header, with where it stands."""
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        table = [(f"{file} line {reader.line_num}", cells) for cells in reader]
    except csv.Error as error:
        raise _damaged(file, error) from None
    if not table:
        raise _damaged(file, "it is empty")
    header = table[0][1]
    for where, cells in table:
        if len(cells) != len(header):
            raise _damaged(where, f"{len(cells)} values under {len(header)} headings")
    return header, table[1:]


def number(where: str, column: str, cell: str) -> float | int | None:
    """What stands in a cell of a table; None if it is empty."""
    if not cell:
        return None
    try:
        return float(cell) if any(c in cell for c in ".enai") else int(cell)
    except ValueError:
        raise _damaged(where, f"{column} should be a number, got {cell!r}") from None


def _whole(where: str, column: str, cell: str) -> int:
    try:
        return int(cell)
    except ValueError:
        raise _damaged(where, f"{column} should be a whole number, got {cell!r}") from None


def _damaged(where: Path | str, why: object) -> HoldfastError:
    return HoldfastError(f"{where} is damaged: {why}")
