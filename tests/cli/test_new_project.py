"""``holdfast new project``: what it lays out runs as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command_line import holdfast


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *arguments]
    here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=here)


def table(target: str) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"clinic": draw.choice(["Ash", "Birch", "Cedar"], 200), "age": draw.normal(50, 15, 200)}
    )
    rows["sex"] = draw.choice(["f", "m"], 200)
    rows["dose"] = 0.1 * rows["age"] + (rows["sex"] == "m") + draw.normal(0, 0.1, 200)
    rows["ill"] = np.where(rows["dose"] > 5.5, "yes", "no")
    return rows.drop(columns="ill" if target == "dose" else "dose")


def test_the_example_runs(tmp_path: Path) -> None:
    made = holdfast("new", "project", str(tmp_path / "fraud"))
    assert "2440 rows of 5 organisations" in made.out
    ran = run_in(tmp_path / "fraud", "run", "experiment.toml", "rounds=2", "--name", "first")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "fraud/runs/first/report.html").is_file()


@pytest.mark.parametrize(("target", "loss"), [("ill", "cross-entropy"), ("dose", "mse")])
def test_an_own_table(tmp_path: Path, target: str, loss: str) -> None:
    rows = table(target)
    rows.to_csv(tmp_path / "mine.csv", index=False)
    made = holdfast(
        "new", "project", str(tmp_path / "p"), "--csv", str(tmp_path / "mine.csv"), "--target", target,
        "--node", "clinic",
    )  # fmt: skip
    assert made.code == 0, made.err
    read = [pd.read_csv(tmp_path / "p/data" / name) for name in ("train.csv", "test.csv")]
    assert len(read[0]) + len(read[1]) == len(rows)
    assert set(read[1]["clinic"]) == {"Ash", "Birch", "Cedar"}
    toml = (tmp_path / "p/experiment.toml").read_text()
    assert f'loss = "{loss}"' in toml
    assert 'one_hot = ["sex"]' in toml
    ran = run_in(tmp_path / "p", "run", "experiment.toml", "rounds=2", "--name", "first")
    assert ran.returncode == 0, ran.stderr


def test_mistakes_are_told(tmp_path: Path) -> None:
    table("ill").to_csv(tmp_path / "mine.csv", index=False)
    where = ["new", "project", str(tmp_path / "p"), "--csv", str(tmp_path / "mine.csv")]
    assert "--target, the column to predict" in holdfast(*where).err
    wrong = holdfast(*where, "--target", "il", "--node", "clinic")
    assert "did you mean 'ill'" in wrong.err
    assert not (tmp_path / "p").exists()
    (tmp_path / "p").mkdir()
    (tmp_path / "p/notes.txt").write_text("mine")
    assert "is not empty" in holdfast(*where, "--target", "ill", "--node", "clinic").err
