"""Runs that are shown together: what sets them apart is said, and different problems are not ranked."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import holdfast
from report_page import Page
from sample_run import EXPERIMENT, accuracies, job, two_algorithms, write_run

from holdfast.experiments.record import RunRecord, load_record, overlaid
from holdfast.report import format as words
from holdfast.report.html import report_html
from holdfast.report.verdict import differences, verdict


def one(folder: Path, name: str, accuracy: float, old: str = "", new: str = "", **extra) -> RunRecord:
    """A run of one algorithm that reaches ``accuracy``; ``old`` in its experiment is replaced by ``new``."""
    assert old in EXPERIMENT
    jobs = [job("a", seed, accuracies(0.1, 0.2, accuracy)) for seed in extra.pop("seeds", (0, 1))]
    text = EXPERIMENT.replace(old, new) if old else EXPERIMENT
    return load_record(write_run(folder / name, jobs, name=name, experiment=text, **extra))


def best(records: list[RunRecord]) -> set[int]:
    rows = [row for record in overlaid(records) for row in record.final_table()]
    return words.best_lines(rows, "test_accuracy")


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("h = 0.1", "h = 10.0", "partition is dirichlet(h=0.1) in first, dirichlet(h=10.0) in second"),
        *(
            pytest.param(*rest, marks=pytest.mark.slow)
            for rest in (
                ('"digits"', '"mnist"', "dataset is digits in first, mnist in second"),
                ("[64]", "[8]", "model is mlp(hidden=[64]) in first, mlp(hidden=[8]) in second"),
                ("nodes = 3", 'nodes = 3\nloss = "hinge"', "loss is – in first, hinge in second"),
            )
        ),
    ],
)
def test_different_problems_are_not_ranked(tmp_path: Path, old: str, new: str, difference: str) -> None:
    runs = [one(tmp_path, "first", 0.5), one(tmp_path, "second", 0.9, old, new)]
    assert differences(runs) == [
        "These runs are of different problems, and only lines of the same problem are ranked against each "
        f"other: {difference}."
    ]
    assert best(runs) == set()
    key = difference.partition(" ")[0]
    assert verdict(runs).count(f"ith {key}=") == 2  # a sentence for each problem
    told = " ".join(Page(report_html(runs)).words)
    assert differences(runs)[0] in told
    assert "the best of each column, for the same problem, is bold" in told
    outcome = holdfast("report", *(run.path for run in runs))
    assert (outcome.code, outcome.err) == (0, f"warning: {differences(runs)[0]}\n")


def test_the_same_problem_is_ranked_without_a_warning(tmp_path: Path) -> None:
    same = ('dataset = { name = "digits" }', 'dataset = "digits"')  # the same, written otherwise
    runs = [one(tmp_path, "first", 0.5), one(tmp_path, "second", 0.9, *same)]
    assert differences(runs) == []
    assert best(runs) == {1}
    assert verdict(runs).startswith("After 20 rounds, second: a reaches")
    assert holdfast("report", *(run.path for run in runs)).err == ""


def test_another_network_is_no_other_problem(tmp_path: Path) -> None:
    runs = [one(tmp_path, "first", 0.5), one(tmp_path, "second", 0.9, '"ring"', '"complete"')]
    assert differences(runs) == []
    assert best(runs) == {1}


def test_lines_of_one_problem_compare_across_sweeps(tmp_path: Path) -> None:
    axis = "problem.partition.h"
    jobs = [job("a", 0, accuracies(0.1, 0.2, 0.4 + 0.1 * i), axes={axis: h}) for i, h in enumerate("12")]
    swept = EXPERIMENT.replace("h = 0.1", "h = [1, 2]")
    runs = [
        load_record(write_run(tmp_path / "swept", jobs, name="swept", axes=(axis,), experiment=swept)),
        one(tmp_path, "single", 0.9, "h = 0.1", "h = 2", seeds=(0,)),
    ]
    assert best(runs) == {2}  # of the two lines with h = 2
    assert (
        "partition is dirichlet(h=1) and dirichlet(h=2) in swept, dirichlet(h=2) in single."
        in (differences(runs)[0])
    )


def test_other_seeds_and_rounds_are_told(tmp_path: Path) -> None:
    longer = [job("a", 0, accuracies(0.1, 0.2, 0.3, 0.4))]
    runs = [
        load_record(two_algorithms(tmp_path / "first", name="first")),
        load_record(write_run(tmp_path / "second", longer, name="second")),
    ]
    assert differences(runs) == [
        "These runs do not have the same seeds: 0 and 1 in first, 0 in second.",
        "These runs do not have the same number of rounds: 20 in first, 30 in second.",
    ]
    told = " ".join(Page(report_html(runs)).words)
    assert all(difference in told for difference in differences(runs))


def test_a_single_run_differs_from_nothing(good_run: RunRecord) -> None:
    assert differences([good_run]) == []
