"""A new run directory, and what is written into it before the first round."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.data import FederatedData
from holdfast.data.lazy import AnyData
from holdfast.experiments.assembly import Setting
from holdfast.experiments.columns import DELAY_COLUMNS, EPSILON_COLUMN, SOLVER_COLUMNS
from holdfast.experiments.planned import Planned, PlannedJob
from holdfast.experiments.record_files import short


def new_folder(root: Path, name: str) -> Path:
    """A new, empty folder under ``root``, called by ``name`` and the time."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in range(1000):
        folder = root / (stem if attempt == 0 else f"{stem}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise HoldfastError(f"cannot make the run directory {folder}: {error.strerror}") from None
        return folder
    raise HoldfastError(f"cannot make a run directory for {stem} under {root}: too many of that name")


def named_folder(root: Path, name: str) -> Path:
    """The new, empty folder ``name`` under ``root``."""
    folder = root / name
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name.strip(".") == "":
        raise HoldfastError(f"--name {name}: expected letters, digits, '.', '_' and '-', such as baseline-2")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise HoldfastError(
            f"{folder} exists already: choose another --name, or continue it with: holdfast resume {folder}"
        ) from None
    except OSError as error:
        raise HoldfastError(f"cannot make the run directory {folder}: {error.strerror}") from None
    return folder


def extra_columns(plan: Planned) -> list[str]:
    """What only some experiments record."""
    sporadic = any(plan.setting(job).network.activity is not None for job in plan.jobs)
    solving = any(plan.method(job).uses_solver for job in plan.jobs)
    private = any(plan.setting(job).terms.private is not None for job in plan.jobs)
    return (
        (DELAY_COLUMNS if sporadic else [])
        + (SOLVER_COLUMNS if solving else [])
        + ([EPSILON_COLUMN] if private else [])
    )


def job_entry(job: PlannedJob) -> dict[str, Any]:
    """What ``summary.json`` says of a job that has not begun."""
    axes = {axis: short(value) for axis, value in job.axes.items()}
    return {
        "id": job.id,
        "algorithm": job.label,
        "seed": job.seed,
        "axes": axes,
        "status": "pending",
        "round": 0,
        "rounds": job.rounds,
        "seconds": 0.0,
    }


def write_setting(folder: Path, setting: Setting, *, durable: bool = True) -> None:
    """The partition and the network as tables."""
    data, labels = setting.data, setting.labels
    named = ["name"] if data.names else []  # such as the hospitals of a table
    header = ["node", *named, "samples", *_class_names(data, labels.shape[1])]
    lines = [
        [node, *(data.names or ())[node : node + 1], int(data.counts[node]), *labels[node].tolist()]
        for node in range(data.nodes)
    ]
    write_csv(folder / "partition.csv", header, lines, durable=durable)
    links = setting.network.weighted_links()
    write_csv(folder / "network.csv", ["i", "j", "weight"], links, durable=durable)


def _class_names(data: AnyData, classes: int) -> list[str]:
    """Of the first ``classes`` labels: there may be more names, of classes that only the test set has."""
    known = data.class_names if isinstance(data, FederatedData) else None
    if known is None or len(known) < classes:
        return list(map(str, range(classes)))
    return list(known[:classes])


def write_csv(path: Path, header: list[str], lines: Sequence[Sequence[Any]], *, durable: bool = True) -> None:
    """A table as a file."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    write_atomic(path, text.getvalue().encode(), durable=durable)
