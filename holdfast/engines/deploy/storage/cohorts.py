"""``cohorts.csv`` of a server: whose answers counted in which round, for the simulator to do the same."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic

HEADER = "round,clients\n"


class Cohorts:
    """The record in ``folder``, a line for each round: its number, and the clients' names."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "cohorts.csv"

    def keep(self, upto: int) -> None:
        """Drops the rounds after ``upto``, which are computed again, and a line that was not finished."""
        lines = self.path.read_text().splitlines(keepends=True)[1:] if self.path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and int(line.partition(",")[0]) <= upto]
        write_atomic(self.path, "".join([HEADER, *kept]).encode())

    def add(self, round: int, clients: Sequence[str]) -> None:
        """Those whose answers counted in ``round``, the first being 1; on disk when it returns."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                file.write(f"{round},{' '.join(clients)}\n".encode())
                os.fsync(file.fileno())
            except OSError:  # no room: it is tried again
                file.truncate(end)
                raise

    def has(self, round: int, client: str) -> bool:
        """Whether ``client``'s answer counted in ``round``, which is over."""
        with self.path.open() as file:
            rows = csv.DictReader(file)
            return any(int(row["round"]) == round and client in row["clients"].split() for row in rows)


def read_cohorts(path: Path, names: Sequence[str]) -> list[list[int]]:
    """The cohort of every round in a server's ``cohorts.csv``, for ``Simulation``; ``names`` of all nodes."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if [int(row["round"]) for row in rows] != list(range(1, len(rows) + 1)):
        raise HoldfastError(f"{path}: expected the rounds 1, 2, ... one after the other")
    return [sorted(names.index(name) for name in row["clients"].split()) for row in rows]
