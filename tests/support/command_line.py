"""The command line inside this process or in one of its own, and small experiments for it."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from forks import Forked, command

from holdfast.cli import main
from holdfast.experiments.plan import Plan
from holdfast.experiments.runner import Runner

SMALL = """\
name = "small"
rounds = 4
checkpoint_every = 3
evaluate_every = 2

[problem]
dataset = "digits"
nodes = 4
partition = { name = "dirichlet", h = 0.5 }
model = { name = "mlp", hidden = [8] }
batch_size = 8

[network]
topology = "ring"

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 2

[[algorithm]]
name = "gossip"
lr = 0.1
local_steps = 2
"""


class Outcome(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def holdfast(*arguments: object) -> Outcome:
    """Runs a command as the console script does, but in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = ["holdfast", *map(str, arguments)]
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def forked(*arguments: object, cwd: Path) -> Forked:
    """Starts a command in a process of its own, without importing torch anew."""
    return Forked(cwd, command, *map(str, arguments))


def process(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """The same in a fresh interpreter, with as many threads as we have: they may change rounding."""
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def experiment_file(folder: Path, text: str = SMALL) -> Path:
    """An experiment as a file in ``folder``."""
    path = folder / "small.toml"
    path.write_text(text)
    return path


def make_plan(folder: Path, *overrides: str, text: str = SMALL) -> Plan:
    """The checked plan of an experiment."""
    plan = Plan.of_file(experiment_file(folder, text), list(overrides), None, "cpu")
    plan.check()
    return plan


def run_plan(plan: Plan, root: Path) -> Path:
    """Runs a plan to its end, without plots and report; its directory."""
    runner = Runner.start(plan, root)
    runner.execute()
    return runner.folder


def rows(folder: Path) -> list[dict[str, str]]:
    """All of metrics.csv as text, but for the wall times."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{key: cell for key, cell in row.items() if key != "seconds"} for row in csv.DictReader(file)]
