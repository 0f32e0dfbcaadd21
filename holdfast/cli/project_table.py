"""The table of ``holdfast new project``: read from a CSV file, prepared as the options say, and checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdfast.core.errors import HoldfastError, unknown

if TYPE_CHECKING:
    import pandas

MOST_CLASSES = 20  # whole numbers are classes if they are 0, 1, 2, ... and not more than this
MOST_CODES = 100  # that look like numbers
DATE = r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([T ].*)?"
SEPARATORS = ",;\t|"


@dataclass(frozen=True)
class Table:
    """Rows to learn from, and which column is what."""

    rows: pandas.DataFrame
    target: str
    node: str
    notes: list[str] = field(default_factory=list)  # what was done to the rows, in words

    @property
    def words(self) -> list[str]:
        """Input columns of words, which become columns of zeros and ones."""
        return [name for name in self.inputs if self.rows[name].dtype.kind not in "biuf"]

    @property
    def inputs(self) -> list[str]:
        return [str(name) for name in self.rows.columns if name not in (self.target, self.node)]

    @property
    def is_classification(self) -> bool:
        """Words, truth values and numbers that count 0, 1, 2, ... are classes; others are quantities."""
        if self.rows[self.target].dtype.kind not in "iuf":
            return True
        return len(self.values) <= MOST_CLASSES and self.values == list(range(len(self.values)))

    @property
    def values(self) -> list[Any]:
        """The values of the target, each once."""
        return sorted(set(self.rows[self.target].tolist()))

    @property
    def target_in_words(self) -> str:
        """How the target was understood."""
        if self.is_classification:
            return f"{self.target} is one of {len(self.values)} classes: {_listed(self.values)}"
        return f"{self.target} is a number from {self.values[0]:.5g} to {self.values[-1]:.5g}"


@dataclass(frozen=True)
class TableOptions:
    """How a table is prepared before it is checked."""

    words: Sequence[str] = ()  # columns whose entries are names, even if they look like numbers
    leave_out: Sequence[str] = ()  # columns
    fill: bool = False  # missing values

    @property
    def any(self) -> bool:
        return bool(self.words or self.leave_out or self.fill)


def require_pandas() -> ModuleType:
    """pandas, or an error that says how to install it."""
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    return pandas


def read_table(csv: Path, target: str, node: str, options: TableOptions) -> Table:
    """The rows of ``csv``, checked."""
    rows, notes = _rows(csv, options.words)
    columns = list(map(str, rows.columns))
    for name in (target, node, *options.words, *options.leave_out):
        if name not in columns:
            raise unknown("column", name, columns)
    if target == node:
        raise HoldfastError(f"--target and --node are both {target!r}; they are different columns")
    if needed := [name for name in options.leave_out if name in (target, node)]:
        raise HoldfastError(f"--leave-out {needed[0]}: this column is needed, as --target or --node")
    rows = rows.drop(columns=list(options.leave_out))
    if options.fill:
        rows, filled = _filled(rows, target, node)
        notes += filled
    if target in options.words and _as_numbers(rows[target]).notna().all():
        # The files are read again when the experiment is run, and would hold numbers then.
        rows[target] = f"{target} " + rows[target]
    table = Table(rows, target, node, notes)
    _check(csv, table, options)
    return table


def _rows(csv: Path, words: Sequence[str]) -> tuple[pandas.DataFrame, list[str]]:
    """What is in the file, and a note if its format is not the usual one."""
    pandas = require_pandas()
    kept = dict.fromkeys(words, "str")
    try:
        with csv.open(encoding="utf-8-sig") as file:
            head = re.sub(r'"[^"]*"', "", file.readline())
        mark = max(SEPARATORS, key=head.count)  # the first of them, if there is none
        rows = pandas.read_csv(csv, sep=mark, dtype=kept)
        if mark == ",":
            return rows, []
        note = f"columns were separated by {mark!r}"
        commas = pandas.read_csv(csv, sep=mark, decimal=",", dtype=kept)
        if _numeric(commas) > _numeric(rows):
            return commas, [f"{note}, and numbers had decimal commas"]
        return rows, [note]
    except OSError as error:
        raise HoldfastError(f"cannot read {csv}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HoldfastError(f"{csv} is not UTF-8 text; save it as CSV in UTF-8") from None
    except (ValueError, pandas.errors.ParserError) as error:
        raise HoldfastError(f"{csv} is not a CSV file: {str(error).splitlines()[0]}") from None


def _numeric(rows: pandas.DataFrame) -> int:
    return sum(rows[name].dtype.kind in "biuf" for name in rows.columns)


def _filled(rows: pandas.DataFrame, target: str, node: str) -> tuple[pandas.DataFrame, list[str]]:
    """Without gaps: numbers get their column's median, words "unknown"; rows without target or node go."""
    notes = []
    useless = rows[target].isna() | rows[node].isna()
    if useless.any():
        notes.append(f"left out {_counted(int(useless.sum()), 'row')} without {target!r} or {node!r}")
    rows = rows[~useless].copy()  # the index still tells the line
    for name in rows.columns:
        gaps = int(rows[name].isna().sum())
        if not gaps:
            continue
        if gaps == len(rows):
            raise HoldfastError(f"column {name!r} is empty; leave it out with --leave-out {name!r}")
        numeric = rows[name].dtype.kind in "iuf"
        value: Any = float(f"{rows[name].median():.5g}") if numeric else "unknown"
        rows[name] = rows[name].fillna(value)
        notes.append(f"filled {_counted(gaps, 'gap')} of {name!r} with {f'{value:g}' if numeric else value}")
    return rows, notes


def _check(csv: Path, table: Table, options: TableOptions) -> None:
    """Raises one error for all that would fail, or mislead, when the experiment is run."""
    rows = table.rows
    if not table.inputs:
        raise HoldfastError(
            f"{csv}: there is no column beside {table.target!r} and {table.node!r} to learn from"
        )
    unfit = (_unfit(name, rows[name].dropna(), options) for name in table.words)
    found = [*_gaps(rows), *(one for one in unfit if one is not None)]
    if found:
        problems, remedies = "; ".join(one.problem for one in found), [one.option for one in found]
        helps = f", or add {' '.join(filter(None, remedies))}" if any(remedies) else ""
        raise HoldfastError(f"{csv}: {problems}; correct the file{helps}")
    if len(rows) == 0:
        raise HoldfastError(f"{csv} has no rows")
    if len(table.values) == 1:
        raise HoldfastError(f"{csv}: column {table.target!r} is {table.values[0]!r} in every row")
    target = rows[table.target]
    if target.dtype.kind not in "biuf" and _differ(target):
        raise HoldfastError(f"{csv}: column {_different(table.target, target)}; choose another --target")


class Complaint(NamedTuple):
    """What is wrong with a table, and the option that gets around it, if there is one."""

    problem: str
    option: str = ""


def _gaps(rows: pandas.DataFrame) -> Iterator[Complaint]:
    missing = {name: np.flatnonzero(rows[name].isna()) for name in map(str, rows.columns)}
    found = [
        f"{name!r} in {_counted(len(at), 'row')} (the first is line {rows.index[at[0]] + 2})"
        for name, at in missing.items()
        if len(at)
    ]
    if found:
        yield Complaint(f"values are missing: {', '.join(found)}", "--fill")


def _unfit(name: str, column: pandas.Series[Any], options: TableOptions) -> Complaint | None:
    """Why a column of words should not become a column of zeros and ones for each of them."""
    option = shlex.quote(name)
    stray = np.flatnonzero(_as_numbers(column).isna())
    if name not in options.words and len(stray) < len(column) / 2:
        first = f"{column.iloc[stray[0]]!r} in line {column.index[stray[0]] + 2}"
        more = f" and {len(stray) - 1} more that are not" if len(stray) > 1 else ""
        codes = f"--words {option}" if column.nunique() <= MOST_CODES else ""
        return Complaint(f"column {name!r} holds numbers, but {first}{more}", codes)
    if name not in options.words and column.astype(str).str.fullmatch(DATE).mean() > 0.5:
        what = f"column {name!r} holds dates, such as {column.iloc[0]!r}, which would have to be numbers"
        return Complaint(what, f"--leave-out {option}")
    if _differ(column):
        return Complaint(f"column {_different(name, column)}", f"--leave-out {option}")
    return None


def _differ(column: pandas.Series[Any]) -> bool:
    """Whether words are names of single rows, such as numbers of patients."""
    return bool(column.nunique() > max(MOST_CLASSES, len(column) // 2))


def _different(name: str, column: pandas.Series[Any]) -> str:
    return (
        f"{name!r} has {column.nunique()} different words in {len(column)} rows, such as {column.iloc[0]!r}"
    )


def _as_numbers(column: pandas.Series[Any]) -> pandas.Series[Any]:
    """NaN where there is none."""
    import pandas

    return pandas.to_numeric(column, errors="coerce")


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(values: list[Any]) -> str:
    shown = list(map(str, values[:MOST_CLASSES]))
    return ", ".join(shown if len(values) <= MOST_CLASSES else [*shown, "..."])
