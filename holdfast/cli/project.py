"""``holdfast new project``: a folder to start from, with an experiment, a model, a test and data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import write_atomic

if TYPE_CHECKING:
    import pandas

TEST_SHARE = 0.2  # of each organisation's rows


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
        """Words, truth values and whole numbers are classes; other numbers are to be estimated."""
        return bool(self.rows[self.target].dtype.kind != "f")


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
    test = table.rows.groupby(table.node, group_keys=False).sample(frac=TEST_SHARE, random_state=0)
    train = table.rows.drop(index=test.index)
    if len(test) == 0:
        raise HoldfastError(f"{csv}: too few rows to keep some of each {table.node!r} for testing")
    (folder / "data").mkdir(parents=True)
    train.to_csv(folder / "data" / "train.csv", index=False)
    test.to_csv(folder / "data" / "test.csv", index=False)
    files = {
        "experiment.toml": _experiment(table, folder.name),
        "model.py": _model(table, train),
        "test_project.py": TEST,
        "README.md": README.format(name=folder.name),
    }
    for name, text in files.items():
        write_atomic(folder / name, text.encode())
    organisations = train[table.node].nunique()
    print(f"wrote {folder}: {len(train)} rows of {organisations} organisations, and {len(test)} rows to test")
    print(f"next: cd {folder} && holdfast run experiment.toml")


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
    except (ValueError, pandas.errors.ParserError) as error:
        raise HoldfastError(f"{csv} is not a CSV file: {str(error).splitlines()[0]}") from None
    for name in (target, node):
        if name not in rows.columns:
            raise unknown("column", name, list(map(str, rows.columns)))
    missing = rows.columns[rows.isna().any()].tolist()
    if missing:
        raise HoldfastError(f"{csv}: values are missing in column {missing[0]!r}; fill them or drop the rows")
    return Table(rows, target, node)


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


def _experiment(table: Table, name: str) -> str:
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
    words = ", ".join(f'"{name}"' for name in table.words)
    one_hot = f"one_hot = [{words}]  # columns of words\n" if words else ""
    nodes = table.rows[table.node].nunique()
    loss = "cross-entropy" if table.is_classification else "mse"
    return EXPERIMENT.format(
        name=safe, target=table.target, node=table.node, one_hot=one_hot, loss=loss, nodes=nodes
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
            scales.append(_short(values.std(ddof=0)) or 1.0)
    return MODEL.format(means=means, scales=scales, shape="" if table.is_classification else ".squeeze(-1)")


def _short(value: Any) -> float:
    return float(f"{value:.5g}")


EXPERIMENT = """\
# Several organisations learn one model together; each row of the table belongs to one of them.
#
#   holdfast run experiment.toml                          train, compare, write a report
#   holdfast run experiment.toml "algorithm.lr=[0.1,0.3]" a list makes a sweep
#   holdfast tune experiment.toml                         find the best step sizes
#   holdfast list                                         what can be chosen, with parameters

name = "{name}"
rounds = 60             # communication rounds
seeds = [0]
evaluate_every = 5      # rounds between measurements

[problem]
nodes = {nodes}               # the organisations
model = "model:Net"     # the class Net in model.py
loss = "{loss}"
batch_size = 32
weights = "samples"     # every row counts alike; "uniform": every organisation

[problem.dataset]
name = "csv"
file = "data/train.csv"
test_file = "data/test.csv"
target = "{target}"
node = "{node}"
{one_hot}
[network]
topology = "server"     # or "ring", "complete": nobody in the middle

[[algorithm]]
name = "fedavg"
lr = 0.1
local_steps = 10

[[algorithm]]
name = "scaffold"       # corrects what makes fedavg drift
lr = 0.1
local_steps = 10
"""

MODEL = '''\
"""The model that is trained: change it as you like."""

import torch
from torch import Tensor, nn

# Of the training rows, when this project was made. Organisations that do not show each other their rows
# agree on such numbers in advance, for example from public data.
MEANS = {means}
SCALES = {scales}


class Net(nn.Module):
    """A small network on standardised columns."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(MEANS))
        self.register_buffer("scales", torch.tensor(SCALES))
        self.layers = nn.Sequential(nn.Linear(len(MEANS), 32), nn.ReLU(), nn.Linear(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x - self.means) / self.scales){shape}
'''

TEST = '''\
"""Run with: python -m pytest"""

import json
import subprocess
import sys


def test_training_reduces_the_loss(tmp_path):
    command = [sys.executable, "-m", "holdfast", "run", "experiment.toml", "rounds=10"]
    subprocess.run([*command, "--runs-dir", str(tmp_path), "--name", "try"], check=True)
    summary = json.loads((tmp_path / "try" / "summary.json").read_text())
    lines = (tmp_path / "try" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train_loss")
    for job in summary["jobs"]:
        first = next(line for line in lines[1:] if line.startswith(job["algorithm"] + ","))
        assert job["final"]["train_loss"] < float(first.split(",")[column])
'''

README = """\
# {name}

    holdfast run experiment.toml     # train, and write a report
    holdfast tune experiment.toml    # find better step sizes
    python -m pytest                 # check that the project works

- `experiment.toml`: what is learned, by which methods, over which network
- `model.py`: the model
- `data/`: a fifth of each organisation's rows is kept for testing
"""
