"""What a member leaves in its folder for its operators: models, and tables with a line for each round.

``metrics.csv`` and ``summary.json`` are a record for ``holdfast report``. ``cohorts.csv`` and ``steps.csv``
say what a simulation needs to repeat the run.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.files import replace_durably, whole_lines, write_atomic, write_json
from holdfast.problem.flat import FlatModel
from holdfast_deploy.federation import Federation
from holdfast_deploy.storage.links import START_ANEW
from holdfast_deploy.storage.messages import BeyondRepairError, DamagedError, put

Row = Mapping[str, Any]

COSTS = ("payload_bytes", "payload_bytes_per_link", "gradient_evaluations", "sample_gradients", "seconds")


class Table:
    """Lines by round. A line is on disk when ``add`` returns; a torn one is cut off before the next.

    What a round costs does not depend on how many there were before. The file is read at the start and when
    rounds are done again, and written again only when there is a figure that the rounds before did not have.
    """

    def __init__(self, path: Path, job: dict[str, Any]) -> None:
        self.path, self.job = path, job
        self._forget()

    def _forget(self) -> None:
        self.columns: list[str] = []
        self.last = -1  # the last round that stands there
        self._size = 0  # bytes up to the end of its line; beyond, a line may be torn

    def keep(self, upto: int) -> list[dict[str, Any]]:
        """Reads the rows up to a round, which remain; later ones are cut off, and so is a torn line."""
        self._forget()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        whole = whole_lines(content)
        try:
            reader = csv.DictReader(io.StringIO(whole.decode(), newline=""), strict=True)
            rows = [row | self.job for row in reader if int(row["round"]) <= upto]
            columns = self._ordered(reader.fieldnames or ())
        except (ValueError, KeyError, TypeError, csv.Error):
            raise DamagedError(
                f"{self.path} cannot be read: the rows before round {upto + 1} are lost"
            ) from None
        kept = self._text(columns, rows, header=True)
        if content.startswith(kept):
            with self.path.open("r+b") as file:
                file.truncate(len(kept))
            self._note(columns, rows, len(kept))
        return rows  # a file that looks otherwise is written again with the next row

    def add(self, row: Row) -> None:
        """Appends the figures of a round; those of the same round and later ones, if any, are replaced."""
        if row["round"] <= self.last or not self._reaches():
            self._go_back(row["round"])
        if self._size and all(name in self.columns for name in row):
            self._append(row)
        else:
            self._rewrite(row)

    def _reaches(self) -> bool:
        """Whether all lines are there still; somebody may have taken the file away."""
        return self._size > 0 and self.path.exists() and self.path.stat().st_size >= self._size

    def _go_back(self, round: int) -> list[dict[str, Any]]:
        """The rows before ``round``, which alone remain."""
        try:
            return self.keep(round - 1)
        except DamagedError:  # when a member starts, its people are told
            return []

    def _append(self, row: Row) -> None:
        line = self._text(self.columns, [row], header=False)
        with self.path.open("r+b") as file:
            file.truncate(self._size)  # an attempt for which there was no room may have left a part
            file.seek(self._size)
            file.write(line)
            file.flush()
            os.fdatasync(file.fileno())
        self._note(self.columns, [row], self._size + len(line))

    def _rewrite(self, row: Row) -> None:
        """``row`` after all rows before its round, under the columns of both."""
        rows = [*self._go_back(row["round"]), row]
        columns = self._ordered(name for one in rows for name in one if name is not None)
        text = self._text(columns, rows, header=True)
        write_atomic(self.path, text)
        self._note(columns, rows, len(text))

    def _note(self, columns: list[str], rows: Sequence[Row], size: int) -> None:
        self.columns, self._size = columns, size
        self.last = int(rows[-1]["round"]) if rows else -1

    def _ordered(self, names: Iterable[str]) -> list[str]:
        """Job, round, figures, costs: the order of all tables of metrics."""
        first = [*self.job, "round"]
        return [*first, *(name for name in dict.fromkeys(names) if name not in {*first, *COSTS}), *COSTS]

    def _text(self, columns: Sequence[str], rows: Iterable[Row], *, header: bool) -> bytes:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()


Status = Literal["running", "done", "interrupted", "failed"]

Score = tuple[float, float]  # accuracy and negative loss on a member's own test split: higher is better

OVERALL = {"running": "running", "done": "complete", "interrupted": "interrupted", "failed": "interrupted"}


def write_model(
    folder: Path, model: FlatModel, row: Tensor, notes: dict[str, Any], name: str = "model"
) -> None:
    """The module with parameters ``row`` [d + 2 s] as ``model.safetensors``, or under another ``name``.

    Without BatchNorm's statistics, [d], the file has none: a module that is to load it will say so.
    """
    tensors, memory = {}, set()
    unknown = model.statistics_names if len(row) == model.dim else ()
    state = {key: t for key, t in model.module(row).state_dict().items() if key not in unknown}
    for key, tensor in state.items():
        shared = tensor.data_ptr() in memory  # tied weights, which safetensors would refuse
        memory.add(tensor.data_ptr())
        tensors[key] = tensor.clone() if shared else tensor.contiguous()
    temporary = folder / f".{name}.safetensors.partial"
    try:
        safetensors.torch.save_file(tensors, temporary, {"holdfast": json.dumps(notes)})
    except safetensors.SafetensorError as error:  # it hides a full disk in its text
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(temporary)) from None
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    replace_durably(temporary, folder / f"{name}.safetensors")


def read_model(folder: Path, model: FlatModel) -> Tensor:
    """The parameters, [d], that ``write_model`` wrote."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in model.shapes])


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the models that ``write_model`` wrote under these names, by file."""
    found = {}
    for name in names:
        with (folder / f"{name}.safetensors").open("rb") as file:
            found[f"{name}.safetensors"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def read_results(folder: Path, model: FlatModel) -> tuple[Tensor, dict[str, float]]:
    """The parameters, [d], and the figures that a finished member wrote; nothing of it may have changed."""
    path = folder / "report.json"
    try:
        report = json.loads(path.read_bytes())
        written, metrics = dict(report["models"]), dict(report["metrics"])
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{path} is damaged") from None
    for file, digest in written.items():
        try:
            found = digests(folder, [file.removesuffix(".safetensors")])[file]
        except FileNotFoundError:
            raise DamagedError(f"{folder / file} is missing") from None
        if found != digest:
            raise DamagedError(f"{folder / file} is damaged")
    return read_model(folder, model), metrics


class Record:
    """``metrics.csv`` and ``summary.json`` of a member: a run with a single job."""

    def __init__(self, folder: Path, federation: Federation, member: str, facts: dict[str, int]) -> None:
        self.folder, self.federation = folder, federation
        self.job = {"algorithm": federation.algorithm_name, "seed": federation.seed}
        facts = {"nodes": len(federation.node), **facts}
        self.about = {"name": federation.name, "member": member, "digest": federation.id, "facts": facts}
        self.table = Table(folder / "metrics.csv", self.job)
        self._best: Score | None = None
        self._newest_is_best = False

    def keep(self, upto: int) -> None:
        """Goes on with what was recorded up to a round; later ones are computed again."""
        self._best = None
        for row in self.table.keep(upto):
            self._compare(row)

    def add(self, round: int, figures: dict[str, float], costs: dict[str, float]) -> None:
        """Records the ``figures`` of a round, and the ``costs`` so far, of those that all runs have."""
        row = self.job | {"round": round} | figures | {name: costs[name] for name in COSTS}
        self.table.add(row)
        self._compare(row)

    def is_best(self) -> bool:
        """Whether the newest figures are better on the member's own test split than all before."""
        return self._newest_is_best

    def _compare(self, row: Row) -> None:
        score = _score(row)
        self._newest_is_best = score is not None and (self._best is None or score > self._best)
        if self._newest_is_best:
            self._best = score

    def conclude(self, status: Status, done: int, seconds: float, message: str = "") -> None:
        """Notes how far the member is, and why it ended, if it failed."""
        job = self.job | {"axes": {}, "status": status, "round": done, "rounds": self.federation.rounds}
        job |= {"seconds": round(seconds, 3)} | ({"message": message} if message else {})
        write_json(self.folder / "summary.json", self.about | {"status": OVERALL[status], "jobs": [job]})


def _score(row: Row) -> Score | None:
    """None for a member without a test split."""
    if row.get("test_loss") in (None, ""):
        return None
    return float(row.get("test_accuracy") or 0.0), -float(row["test_loss"])


class RoundRecord:
    """A file with a line for each round, the first being 1, and ``columns`` of values."""

    def __init__(self, path: Path, *columns: str) -> None:
        self.path, self.header = path, ",".join(["round", *columns]) + "\n"

    def lines(self) -> dict[int, list[str]]:
        """The values by round, without a line that was not finished."""
        content = whole_lines(self.path.read_bytes()) if self.path.exists() else b""
        try:
            lines = [line.split(",") for line in content.decode().splitlines()[1:]]
            return {int(round): values for round, *values in lines}
        except ValueError:
            raise BeyondRepairError(
                f"{self.path} is damaged: put it back as it was, or {START_ANEW}"
            ) from None

    def keep(self, upto: int | None = None) -> None:
        """Drops the rounds after ``upto``, which are computed again."""
        kept = [",".join([str(r), *v]) for r, v in self.lines().items() if upto is None or r <= upto]
        write_atomic(self.path, "".join([self.header, *(f"{line}\n" for line in kept)]).encode())

    def add(self, round: int, *values: object) -> None:
        """A line that is on disk when this returns."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                put(file, (",".join(map(str, [round, *values])) + "\n").encode())
                os.fsync(file.fileno())
            except OSError:  # no room: it is tried again
                file.truncate(end)
                raise


def read_cohorts(path: Path, names: Sequence[str]) -> list[list[int]]:
    """Whose answers counted, by round, of a server's ``cohorts.csv``: the ``cohort`` of a ``Simulation``.

    ``names`` are those of all nodes, in the order of the federation file.
    """
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if [int(row["round"]) for row in rows] != list(range(1, len(rows) + 1)):
        raise HoldfastError(f"{path}: expected the rounds 1, 2, ... one after the other")
    return [sorted(names.index(name) for name in row["clients"].split()) for row in rows]


def read_steps(paths: Sequence[Path | str]) -> list[list[int]]:
    """[rounds][nodes]: the local steps in all nodes' ``steps.csv``: the ``steps`` of a ``Simulation``.

    ``paths`` are in the order of the nodes. Who took no part in a round has 1 there, which nobody reads.
    """
    taken = []
    for path in paths:
        with Path(path).open() as file:
            taken.append({int(row["round"]): int(row["steps"]) for row in csv.DictReader(file)})
    last = max((max(own, default=0) for own in taken), default=0)
    return [[own.get(round, 1) for own in taken] for round in range(1, last + 1)]
