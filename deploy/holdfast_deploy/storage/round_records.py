"""What differed from round to round in a deployed run, recorded so that the simulator can do the same."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.files import whole_lines, write_atomic
from holdfast_deploy.storage.incarnations import START_ANEW
from holdfast_deploy.storage.messages import BeyondRepairError, put


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
