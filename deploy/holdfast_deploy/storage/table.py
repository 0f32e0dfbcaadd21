"""``metrics.csv`` of a member: a line for each measured round, appended."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.files import whole_lines, write_atomic
from holdfast_deploy.storage.messages import DamagedError

Row = Mapping[str, Any]

COSTS = ("payload_bytes", "payload_bytes_per_link", "gradient_evaluations", "sample_gradients", "seconds")


class Table:
    """Lines by round. A line is on disk when ``add`` returns; a torn one is cut off before the next.

    What a round costs does not depend on how many there were before. The file is read at the start and when
    rounds are done again, and written anew only when there is a figure that the rounds before did not have.
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
        return rows  # a file that looks otherwise is written anew with the next row

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
