"""``holdfast new project``: what it lays out runs as it is."""

from __future__ import annotations

import csv
import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from command_line import Outcome, forked, holdfast


def run_in(folder: Path, *arguments: str) -> None:
    running = forked(*arguments, cwd=folder)
    _, err = running.communicate()
    assert running.returncode == 0, err


def table(target: str) -> pd.DataFrame:
    draw = np.random.default_rng(0)
    rows = pd.DataFrame(
        {"clinic": draw.choice(["Ash", "Birch", "Cedar"], 200), "age": draw.normal(50, 15, 200)}
    )
    rows["sex"] = draw.choice(["f", "m"], 200)
    rows["dose"] = 0.1 * rows["age"] + (rows["sex"] == "m") + draw.normal(0, 0.1, 200)
    rows["ill"] = np.where(rows["dose"] > 5.5, "yes", "no")
    rows["grams"] = (1000 * rows["dose"]).round().astype(int)
    return rows[["clinic", "age", "sex", target]]


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    made = holdfast("new", "project", str(tmp_path / "fraud"))
    assert "2440 rows of 5 organisations" in made.out
    run_in(tmp_path / "fraud", "run", "experiment.toml", "rounds=2", "--name", "first")
    assert (tmp_path / "fraud/runs/first/report.html").is_file()


@pytest.mark.parametrize(
    ("target", "loss"),
    [
        ("ill", "cross-entropy"),
        *(pytest.param(name, "mse", marks=pytest.mark.slow) for name in ("dose", "grams")),
    ],
)
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
    run_in(tmp_path / "p", "run", "experiment.toml", "rounds=10", "--name", "first")
    jobs = json.loads((tmp_path / "p/runs/first/summary.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["done", "done"]
    if loss == "mse":  # the step size fits targets of any scale
        assert all(job["final"]["train_loss"] < 0.2 * rows[target].var() for job in jobs)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (["yes", "no"], "ill is one of 2 classes: no, yes"),
        ([True, False], "ill is one of 2 classes: False, True"),
        ([0.0, 1.0], "ill is one of 2 classes: 0, 1"),
        ([2, 0, 1], "ill is one of 3 classes: 0, 1, 2"),
        ([1, 2], "ill is a number from 1 to 2"),
        (list(range(30)), "ill is a number from 0 to 29"),
        ([0.5, 1.0], "ill is a number from 0.5 to 1"),
    ],
)
def test_it_says_how_the_target_was_understood(tmp_path: Path, values: list[object], told: str) -> None:
    rows = table("age")
    rows["ill"] = (values * len(rows))[: len(rows)]
    rows.to_csv(tmp_path / "mine.csv", index=False)
    made = new(tmp_path, "ill", "clinic")
    assert told in made.out
    written = pd.read_csv(tmp_path / "p/data/train.csv")["ill"]
    assert (written.dtype.kind == "f") == ("number" in told)  # floats are quantities to the experiment


def new(folder: Path, target: str, node: str, *options: str) -> Outcome:
    where = ["new", "project", str(folder / "p"), "--csv", str(folder / "mine.csv")]
    return holdfast(*where, "--target", target, "--node", node, *options)


def test_columns_may_have_any_name(tmp_path: Path) -> None:
    rows = table("ill").rename(columns={"ill": 'ill "today"', "sex": "sex\\gender"})
    rows.to_csv(tmp_path / "mine.csv", index=False)
    assert new(tmp_path, 'ill "today"', "clinic").code == 0
    read = tomllib.loads((tmp_path / "p/experiment.toml").read_text())["problem"]["dataset"]
    assert (read["target"], read["one_hot"]) == ('ill "today"', ["sex\\gender"])


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    def complaint(rows: pd.DataFrame, node: str = "clinic", **how: Any) -> str:
        rows.to_csv(tmp_path / "mine.csv", index=False, **how)
        made = new(tmp_path, "ill", node)
        assert made.code == 2
        assert not (tmp_path / "p").exists()
        return made.err

    rows = table("ill")
    gaps = rows.copy()
    gaps.loc[[3, 7], "age"] = np.nan
    gaps.loc[5, "sex"] = None
    told = complaint(gaps)
    assert "'age' in 2 rows (the first is line 5), 'sex' in 1 row (the first is line 7)" in told
    assert "not UTF-8" in complaint(rows.replace("Ash", "Süd"), encoding="latin-1")
    assert "both 'ill'" in complaint(rows, node="ill")
    assert "in every row" in complaint(rows.assign(ill="yes"))
    assert "no column beside" in complaint(rows[["clinic", "ill"]])
    named = rows.assign(patient=[f"P{number}" for number in range(len(rows))])
    assert "column 'patient' has 200 different words in 200 rows" in complaint(named)
    stray = rows.assign(age=rows["age"].astype(str))
    stray.loc[[8, 9], "age"] = ["old", "n/k"]
    told = complaint(stray)
    assert (
        "column 'age' holds numbers, but 'old' in line 10 and 1 more that are not; correct the file\n" in told
    )


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_spreadsheets_of_all_countries_are_read(tmp_path: Path, mark: str, decimal: str) -> None:
    rows = table("ill").replace("Ash", "Süd & West")
    rows.to_csv(tmp_path / "mine.csv", index=False, sep=mark, decimal=decimal, encoding="utf-8-sig")
    made = new(tmp_path, "ill", "clinic")
    assert f"note: columns were separated by {mark!r}" in made.out, made.err
    assert ("decimal commas" in made.out) == (decimal == ",")
    written = pd.concat(pd.read_csv(tmp_path / "p/data" / name) for name in ("train.csv", "test.csv"))
    assert written["age"].sum() == pytest.approx(rows["age"].sum(), rel=1e-12)
    assert set(written["clinic"]) == {"Süd & West", "Birch", "Cedar"}


def test_separators_in_quoted_names_do_not_count(tmp_path: Path) -> None:
    rows = table("ill").rename(columns={"age": "age, in years, at entry", "sex": "sex, if known"})
    rows.to_csv(tmp_path / "mine.csv", index=False, sep=";", quoting=csv.QUOTE_ALL)
    made = new(tmp_path, "ill", "clinic")
    assert "columns were separated by ';'" in made.out, made.err


def test_gaps_are_filled_if_asked_for(tmp_path: Path) -> None:
    rows = table("ill")
    rows.loc[[3, 7], "age"], rows.loc[5, "sex"], rows.loc[9, "ill"] = np.nan, None, None
    rows.to_csv(tmp_path / "mine.csv", index=False)
    assert "correct the file, or add --fill\n" in new(tmp_path, "ill", "clinic").err
    made = new(tmp_path, "ill", "clinic", "--fill")
    median = float(f"{rows.drop(index=9)['age'].median():.5g}")
    assert "note: left out 1 row without 'ill' or 'clinic'" in made.out, made.err
    assert f"note: filled 2 gaps of 'age' with {median:g}" in made.out
    assert "note: filled 1 gap of 'sex' with unknown" in made.out
    written = pd.concat(pd.read_csv(tmp_path / "p/data" / name) for name in ("train.csv", "test.csv"))
    assert len(written) == 199
    assert written.notna().all().all()
    assert (written["age"] == median).sum() >= 2


def test_columns_are_left_out_if_asked_for(tmp_path: Path) -> None:
    rows = table("ill").assign(came=[f"{day % 28 + 1}.12.2026" for day in range(200)])
    rows.to_csv(tmp_path / "mine.csv", index=False)
    told = new(tmp_path, "ill", "clinic").err
    assert "column 'came' holds dates, such as '1.12.2026', which would have to be numbers" in told
    assert "this column is needed" in new(tmp_path, "ill", "clinic", "--leave-out", "ill").err
    assert "did you mean 'came'" in new(tmp_path, "ill", "clinic", "--leave-out", "cam").err
    made = new(tmp_path, "ill", "clinic", "--leave-out", "came", "--leave-out", "sex")
    assert made.code == 0, made.err
    assert list(pd.read_csv(tmp_path / "p/data/test.csv")) == ["clinic", "age", "ill"]


def test_all_problems_are_told_at_once_with_what_helps(tmp_path: Path) -> None:
    rows = table("ill").assign(
        number=[f"P{i}" for i in range(200)], ward=np.resize(["1", "2", "2A", "3"], 200)
    )
    rows["last seen"] = [f"2026-03-{i % 28 + 1:02}T12:00" for i in range(200)]
    rows.loc[3, "age"] = np.nan
    rows.to_csv(tmp_path / "mine.csv", index=False)
    told = new(tmp_path, "ill", "clinic").err
    options = told.split("or add ")[1]
    assert shlex.split(options) == [
        "--fill", "--leave-out", "number", "--words", "ward", "--leave-out", "last seen",
    ]  # fmt: skip
    made = new(tmp_path, "ill", "clinic", *shlex.split(options))
    assert made.code == 0, made.err


def test_codes_may_look_like_numbers(tmp_path: Path) -> None:
    rows = table("ill")
    rows["ward"] = np.resize(["1", "2"], len(rows))
    rows.loc[4, "ward"] = "2A"  # in one of the two files only, so that the other holds numbers
    rows["stage"] = np.resize(["1", "2", "4"], len(rows))
    rows.to_csv(tmp_path / "mine.csv", index=False)
    made = new(tmp_path, "stage", "clinic", "--words", "ward", "--words", "stage")
    assert "stage is one of 3 classes: stage 1, stage 2, stage 4" in made.out, made.err
    assert 'one_hot = ["sex", "ill", "ward"]' in (tmp_path / "p/experiment.toml").read_text()
    run_in(tmp_path / "p", "run", "experiment.toml", "rounds=1", "--name", "first")
    held = (tmp_path / "p/runs/first/partition.csv").read_text().splitlines()[0]
    assert held == "node,name,samples,stage 1,stage 2,stage 4"
    dimension = json.loads((tmp_path / "p/runs/first/summary.json").read_text())["facts"]["dimension"]
    columns = 1 + 2 + 3 + 2  # age, sex, ward, ill
    assert dimension == (columns + 1) * 32 + 33 * 3


def test_what_would_mislead_is_told(tmp_path: Path) -> None:
    rows = table("ill")
    rows["ill"] = ["yes", *["no"] * 9] * 20
    tiny = pd.DataFrame({"clinic": ["Dale", "Elm", "Elm"], "age": 50.0, "sex": "f", "ill": "no"})
    pd.concat([rows, tiny]).to_csv(tmp_path / "mine.csv", index=False)
    made = new(tmp_path, "ill", "clinic")
    assert "note: 90.1 % of the rows are 'no'; a model that always says so is as accurate" in made.out
    assert "note: too few rows to keep one for testing: Dale (1), Elm (2)" in made.out


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
