"""``holdfast new project``: a folder to start from, with an experiment, a model, a test and data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.cli.project_templates import (
    EXPERIMENT,
    MODEL,
    OUTPUTS,
    OUTPUTS_OF_NUMBERS,
    README,
    TARGET,
    TEST,
)
from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import write_atomic

if TYPE_CHECKING:
    import pandas

TEST_SHARE = 0.2  # of each organisation's rows
MOST_CLASSES = 20  # whole numbers are classes if they are 0, 1, 2, ... and not more than this
MOST_IN_ONE_CLASS = 0.8  # of the rows; with more, accuracy alone says little
STEP_SIZE = 0.1  # for classes
STEP_SIZE_OF_NUMBERS = 0.05  # for a target with variance 1; the curvature grows with the variance


@dataclass(frozen=True)
class Table:
    """Rows to learn from, and which column is what."""

    rows: pandas.DataFrame
    target: str
    node: str

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
        return f"{self.target} is a number from {_short(self.values[0]):g} to {_short(self.values[-1]):g}"


def new_project(folder: Path, csv: Path | None, target: str | None, node: str | None) -> None:
    """Writes the project; the rows of ``csv``, or made-up ones, are divided into training and test data."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HoldfastError(f"{folder} exists already and is not empty; choose another name")
    if csv is None:
        if target or node:
            raise HoldfastError("--target and --node name columns of your file; give it with --csv FILE")
        table = _made_up()
    else:
        table = _read(csv, target, node)
    # The experiment reads whole numbers as classes, and others as quantities.
    if table.rows[table.target].dtype.kind in "iuf":
        table.rows[table.target] = table.rows[table.target].astype(int if table.is_classification else float)
    test = table.rows.groupby(table.node, group_keys=False).sample(frac=TEST_SHARE, random_state=0)
    train = table.rows.drop(index=test.index)
    if len(test) == 0:
        raise HoldfastError(f"{csv}: too few rows to keep some of each {table.node!r} for testing")
    (folder / "data").mkdir(parents=True)
    train.to_csv(folder / "data" / "train.csv", index=False)
    test.to_csv(folder / "data" / "test.csv", index=False)
    files = {
        "experiment.toml": _experiment(table, train, folder.name),
        "model.py": _model(table, train),
        "test_project.py": TEST,
        "README.md": README.format(name=folder.name),
    }
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    organisations = train[table.node].nunique()
    print(f"wrote {folder}: {len(train)} rows of {organisations} organisations, and {len(test)} rows to test")
    print(table.target_in_words)
    for note in _notes(table, test):
        print(f"note: {note}")
    print(f"next: cd {folder} && holdfast run experiment.toml")


def _notes(table: Table, test: pandas.DataFrame) -> list[str]:
    """What can be learned from, but would mislead whoever does not know it."""
    notes = []
    shares = table.rows[table.target].value_counts(normalize=True)
    if table.is_classification and shares.iloc[0] > MOST_IN_ONE_CLASS:
        notes.append(
            f"{100 * shares.iloc[0]:.1f} % of the rows are {shares.index[0]!r}; "
            "a model that always says so is as accurate"
        )
    counts = table.rows[table.node].value_counts().sort_index()
    if few := [f"{name} ({count})" for name, count in counts.items() if name not in set(test[table.node])]:
        notes.append(f"too few rows to keep one for testing: {', '.join(few)}")
    return notes


def _read(csv: Path, target: str | None, node: str | None) -> Table:
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    if target is None or node is None:
        raise HoldfastError(
            "--csv needs --target, the column to predict, and --node, the column of organisations"
        )
    try:
        rows = pandas.read_csv(csv)
    except OSError as error:
        raise HoldfastError(f"cannot read {csv}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise HoldfastError(f"{csv} is not UTF-8 text; save it as CSV in UTF-8") from None
    except (ValueError, pandas.errors.ParserError) as error:
        raise HoldfastError(f"{csv} is not a CSV file: {str(error).splitlines()[0]}") from None
    table = Table(rows, target, node)
    _check(csv, table)
    return table


def _check(csv: Path, table: Table) -> None:
    """Complains about what would fail, or mislead, when the experiment is run."""
    import pandas

    rows, columns = table.rows, list(map(str, table.rows.columns))
    if len(columns) == 1 and (mark := next((mark for mark in ";\t|" if mark in columns[0]), None)):
        raise HoldfastError(f"{csv} separates columns by {mark!r}; save it with commas, and decimal points")
    for name in (table.target, table.node):
        if name not in columns:
            raise unknown("column", name, columns)
    if table.target == table.node:
        raise HoldfastError(f"--target and --node are both {table.target!r}; they are different columns")
    if not table.inputs:
        raise HoldfastError(
            f"{csv}: there is no column beside {table.target!r} and {table.node!r} to learn from"
        )
    missing = {name: np.flatnonzero(rows[name].isna()) for name in columns}
    told = [
        f"{name!r} in {len(at)} row{'s' if len(at) > 1 else ''} (the first is line {at[0] + 2})"
        for name, at in missing.items()
        if len(at)
    ]
    if told:
        raise HoldfastError(f"{csv}: values are missing: {', '.join(told)}; fill them or drop the rows")
    if len(table.values) == 1:
        raise HoldfastError(f"{csv}: column {table.target!r} is {table.values[0]!r} in every row")
    for name in table.words:
        numbers = pandas.to_numeric(rows[name], errors="coerce")
        stray = np.flatnonzero(numbers.isna())
        if len(stray) < len(rows) / 2:  # a column of words would have none
            first = f"{rows[name].iloc[stray[0]]!r} in line {stray[0] + 2}"
            others = f" and {len(stray) - 1} more that are not; correct them"
            ending = others if len(stray) > 1 else "; correct it"
            raise HoldfastError(f"{csv}: column {name!r} holds numbers, but {first}{ending}")
    classes = [table.target] if rows[table.target].dtype.kind not in "biuf" else []
    for name in [*table.words, *classes]:
        different = rows[name].nunique()
        if different > max(MOST_CLASSES, len(rows) // 2):
            raise HoldfastError(
                f"{csv}: column {name!r} has {different} different words in {len(rows)} rows, such as "
                f"{rows[name].iloc[0]!r}; leave identifiers out, and write dates and quantities as numbers"
            )


def _made_up() -> Table:
    """Payments at five banks; fraud is rare, and customers differ from bank to bank."""
    try:
        import pandas
    except ImportError:
        raise HoldfastError("pandas is not installed: pip install 'holdfast[pandas]'") from None
    draw = np.random.default_rng(0)
    parts = []
    for number, (bank, count) in enumerate(
        {"Aurora": 1200, "Borealis": 900, "Cirrus": 500, "Delta": 300, "Echo": 150}.items()
    ):
        amount = draw.lognormal(3 + 0.3 * number, 1.0, count)
        hour, abroad = draw.integers(0, 24, count), draw.random(count) < 0.1 + 0.05 * number
        score = 0.8 * np.log(amount) + 2 * abroad + 1.2 * (hour < 5) - 5.3 + draw.normal(0, 0.7, count)
        columns = {"bank": bank, "amount": amount.round(2), "hour": hour, "abroad": abroad.astype(int)}
        parts.append(pandas.DataFrame(columns | {"fraud": np.where(score > 0, "yes", "no")}))
    return Table(pandas.concat(parts, ignore_index=True), "fraud", "bank")


def _experiment(table: Table, train: pandas.DataFrame, name: str) -> str:
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    one_hot = (
        f"one_hot = [{', '.join(map(_quoted, table.words))}]  # columns of words\n" if table.words else ""
    )
    loss, lr = "cross-entropy", STEP_SIZE
    if not table.is_classification:
        loss, lr = "mse", _short(STEP_SIZE_OF_NUMBERS / _scale(train[table.target]) ** 2)
    return EXPERIMENT.format(
        name=safe,
        target=_quoted(table.target),
        node=_quoted(table.node),
        one_hot=one_hot,
        loss=loss,
        lr=lr,
        nodes=train[table.node].nunique(),
    )


def _model(table: Table, train: pandas.DataFrame) -> str:
    """The model's source, with what brings inputs to a common scale."""
    means: list[float] = []
    scales: list[float] = []
    for column in table.inputs:
        if column in table.words:  # zeros and ones stay
            count = table.rows[column].nunique()
            means += [0.0] * count
            scales += [1.0] * count
        else:
            values = train[column].astype(float)
            means.append(_short(values.mean()))
            scales.append(_scale(values))
    if table.is_classification:
        return MODEL.format(means=means, scales=scales, target="", outputs=OUTPUTS)
    target = TARGET.format(mean=_short(train[table.target].mean()), scale=_scale(train[table.target]))
    return MODEL.format(means=means, scales=scales, target=target, outputs=OUTPUTS_OF_NUMBERS)


def _scale(values: pandas.Series[Any]) -> float:
    """The standard deviation; 1 if all values are the same."""
    return _short(values.std(ddof=0)) or 1.0


def _quoted(text: str) -> str:
    """As a string of TOML."""
    return json.dumps(text, ensure_ascii=False)


def _listed(values: list[Any]) -> str:
    shown = list(map(str, values[:MOST_CLASSES]))
    return ", ".join(shown if len(values) <= MOST_CLASSES else [*shown, "..."])


def _short(value: Any) -> float:
    return float(f"{value:.5g}")
