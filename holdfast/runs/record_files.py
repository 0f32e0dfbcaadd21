"""The files of a run directory that reports are made from: their shapes, and reading them with care."""

from __future__ import annotations

import csv
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from holdfast.errors import HoldfastError

# The columns of metrics.csv: algorithm, seed, the swept keys, round, the metrics, then these.
COSTS = ["payload_bytes", "payload_bytes_per_link", "gradient_evaluations", "sample_gradients", "seconds"]

Row = dict[str, float | int | str | None]
Link = tuple[int, int, float]  # i, j, weight, with i < j


class Job(TypedDict):
    """One algorithm at one point of the sweep with one seed."""

    algorithm: str
    seed: int
    axes: dict[str, Any]
    status: Literal["done", "diverged", "running", "pending"]
    round: int
    rounds: int
    seconds: float
    message: NotRequired[str]


class Summary(TypedDict):
    """The content of ``summary.json``."""

    name: str
    status: Literal["complete", "interrupted", "running"]
    jobs: list[Job]
    facts: dict[str, Any]
    digest: NotRequired[str]
    device: NotRequired[str]
    data_dir: NotRequired[str | None]


@dataclass(frozen=True)
class Partition:
    """What each node owns."""

    samples: np.ndarray  # [n] int64
    classes: list[str]  # empty for regression
    counts: np.ndarray  # [n, classes] int64


@dataclass(frozen=True)
class Metrics:
    """The content of ``metrics.csv``."""

    axes: list[str]  # dotted keys that were swept
    names: list[str]
    rows: list[Row]


def short(value: Any) -> str:
    """A swept value in a few characters, for ``metrics.csv`` and labels: a choice by name and parameters."""
    if isinstance(value, dict):
        inner = ",".join(f"{key}={short(part)}" for key, part in value.items() if key != "name")
        return f"{value.get('name', '')}({inner})" if inner else str(value.get("name", ""))
    return str(value)


def read_config(file: Path) -> tuple[dict[str, Any], str]:
    """The experiment, and its text."""
    text = _text(file)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        raise HoldfastError(f"{file} is damaged: {error}") from None


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
    text = _text(file)
    header, lines = _csv(file, text[: text.rfind("\n") + 1])
    at = header.index("round") if "round" in header else 0
    names = header[at + 1 : -len(COSTS)]
    if header != ["algorithm", "seed", *header[2:at], "round", *names, *COSTS] or len(set(header)) < len(
        header
    ):
        raise HoldfastError(f"{file} is damaged: its first line is not the header of a table of metrics")
    words = {"algorithm", *header[2:at]}
    rows: list[Row] = []
    seen = set()
    for line, cells in lines:
        row: Row = {
            column: cell if column in words else _number(f"{file} line {line}", column, cell)
            for column, cell in zip(header, cells, strict=True)
        }
        for column in ("seed", "round"):
            if not isinstance(row[column], int):
                raise HoldfastError(
                    f"{file} line {line} is damaged: {column} should be whole, got {row[column]!r}"
                )
        if (key := tuple(cells[: at + 1])) in seen:
            raise HoldfastError(f"{file} line {line} is damaged: this round of this job stands there twice")
        seen.add(key)
        rows.append(row)
    return Metrics(header[2:at], names, rows)


def read_partition(file: Path) -> Partition:
    """Samples of every node, in all and per class."""
    header, lines = _csv(file, _text(file))
    if header[:2] != ["node", "samples"]:
        raise HoldfastError(f"{file} is damaged: its first line should begin with node,samples")
    table = np.array([_whole(file, line, header, cells) for line, cells in lines], dtype=np.int64)
    table = table.reshape(-1, len(header))
    if len(table) == 0 or not np.array_equal(table[:, 0], np.arange(len(table))):
        raise HoldfastError(f"{file} is damaged: expected one line for every node, from 0 on")
    return Partition(table[:, 1], header[2:], table[:, 2:])


def read_links(file: Path) -> list[Link]:
    """The undirected links of the network; none for a server."""
    header, lines = _csv(file, _text(file))
    if header != ["i", "j", "weight"]:
        raise HoldfastError(f"{file} is damaged: its first line should be i,j,weight")
    links = []
    for line, cells in lines:
        i, j = _whole(file, line, header[:2], cells[:2])
        links.append((i, j, float(_number(f"{file} line {line}", "weight", cells[2]) or 0.0)))
    return links


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise HoldfastError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HoldfastError(f"{file} is damaged: it is not text") from None


def _json(file: Path, shape: Any) -> Any:
    try:
        value = json.loads(_text(file))
        TypeAdapter(shape).validate_python(value)
    except json.JSONDecodeError as error:
        raise HoldfastError(f"{file} is damaged: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HoldfastError(f"{file} is damaged: {f'{where}: ' if where else ''}{first['msg']}") from None
    return value


def _csv(file: Path, text: str) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """The header, and the other lines with their numbers, each as long as the header."""
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        table = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise HoldfastError(f"{file} is damaged: {error}") from None
    if not table:
        raise HoldfastError(f"{file} is damaged: it is empty")
    header = table[0][1]
    for line, cells in table:
        if len(cells) != len(header):
            raise HoldfastError(
                f"{file} line {line} is damaged: {len(cells)} values under {len(header)} headings"
            )
    return header, iter(table[1:])


def _number(where: str, column: str, cell: str) -> float | int | None:
    if not cell:
        return None
    try:
        return float(cell) if any(c in cell for c in ".enai") else int(cell)
    except ValueError:
        raise HoldfastError(f"{where} is damaged: {column} should be a number, got {cell!r}") from None


def _whole(file: Path, line: int, header: list[str], cells: list[str]) -> list[int]:
    try:
        return [int(cell) for cell in cells]
    except ValueError:
        raise HoldfastError(
            f"{file} line {line} is damaged: {', '.join(header)} should be whole numbers"
        ) from None
