"""``holdfast new project``: a folder to start from, with an experiment, a model, a test and data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.project_templates import (
    EXPERIMENT,
    MODEL,
    OUTPUTS,
    OUTPUTS_OF_NUMBERS,
    README,
    TARGET,
    TEST,
)
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    import pandas

    from holdfast.cli.project_table import Table

TEST_SHARE = 0.2  # of each organisation's rows
MOST_IN_ONE_CLASS = 0.8  # of the rows; with more, accuracy alone says little
STEP_SIZE = 0.1  # for classes
STEP_SIZE_OF_NUMBERS = 0.05  # for a target with variance 1; the curvature grows with the variance


def project(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    csv: Annotated[Path | None, typer.Option(help="Your table; without one, made-up payments.")] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    node: Annotated[str | None, typer.Option("--node", help="The column with the organisations.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Option(help="A column of names or codes, even if they look like numbers; may be repeated."),
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="A column that is not used, such as dates; may be repeated.")
    ] = None,
    fill: Annotated[
        bool, typer.Option("--fill", help='Fill gaps: numbers with the median, words with "unknown".')
    ] = False,
) -> None:
    """Lay out a project of your own: an experiment, a model, a test, and a table in two parts.

    [bold]holdfast new project fraud --csv payments.csv --target fraud --node bank[/bold]
    """
    from holdfast.cli.project_table import TableOptions, read_table
    from holdfast.core.files import write_atomic

    options = TableOptions(words or (), leave_out or (), fill)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise HoldfastError(f"{folder} exists already and is not empty; choose another name")
    if csv is None:
        if target or node or options.any:
            raise HoldfastError("the other options are about your file; give it with --csv FILE")
        table = _made_up()
    elif target is None or node is None:
        raise HoldfastError(
            "--csv needs --target, the column to predict, and --node, the column of organisations"
        )
    else:
        table = read_table(csv, target, node, options)
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
    """Notes on what a run accepts, but may give misleading results."""
    from holdfast.cli.project_table import MOST_CLASSES

    notes = list(table.notes)
    for name in table.words:
        if (different := table.rows[name].nunique()) > MOST_CLASSES:
            notes.append(f"column {name!r} has {different} different words, and becomes as many inputs")
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


def _made_up() -> Table:
    """Payments at five banks; fraud is rare, and customers differ from bank to bank."""
    import numpy as np

    from holdfast.cli.project_table import Table, require_pandas

    pandas = require_pandas()
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


def _short(value: Any) -> float:
    return float(f"{value:.5g}")
