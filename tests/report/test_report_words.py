"""What reports say: numbers, verdicts, troubles and the table in the terminal, of small known runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report_page import Page
from rich.console import Console
from sample_run import DEFAULT_METRICS, accuracies, job, write_run

from holdfast.experiments.metrics import METRICS
from holdfast.experiments.record import RunRecord, Spread, load_record
from holdfast.report import format as words
from holdfast.report.html import report_html
from holdfast.report.sections import untested
from holdfast.report.terminal import HEADS, summary_table
from holdfast.report.verdict import troubles, verdict


def printed(records: list[RunRecord], width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(summary_table(records, width))
    return capture.get()


# --- words and numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("test_accuracy", 0.95249, "95.2"),
        ("train_loss", 0.123456, "0.1235"),
        ("train_loss", 1234.5, "1234"),
        ("consensus", 1.2345e-5, "1.23e-05"),
        ("consensus", 0.0, "0"),
        ("consensus", 2e7, "2.00e+07"),
        ("grad_norm2", float("nan"), "nan"),
        ("payload_bytes", 1023, "1,023 B"),
        ("payload_bytes", 45.94 * 2**30, "45.94 GiB"),
        ("payload_bytes", 1536, "1.50 KiB"),
        ("payload_bytes", 512.4 * 2**20, "512.4 MiB"),
        ("gradient_evaluations", 32_000, "32,000"),
        ("gradient_evaluations", 1_250_000, "1.25 M"),
        ("seconds", 8.26, "8.3 s"),
        ("seconds", 59.97, "1 min 0 s"),
        ("seconds", 125.4, "2 min 5 s"),
        ("seconds", 3725, "1 h 2 min"),
        ("my_own_metric", 0.5, "0.5"),
    ],
)
def test_values_as_people_read_them(column: str, value: float, text: str) -> None:
    assert words.format_value(column, value) == text


def test_spreads() -> None:
    assert words.spread_text("test_accuracy", Spread(0.952, 0.0031)) == "95.2 ± 0.3"
    assert words.spread_text("train_loss", Spread(0.12345, 0.01234)) == "0.1235 ± 0.012"
    assert words.spread_text("train_loss", Spread(0.5, None)) == "0.5"


def test_every_metric_has_words_and_a_place_in_the_terminal() -> None:
    for metric in METRICS:
        assert words.quantity(metric).reading
        assert words.quantity(metric).better
        assert metric in HEADS


def test_best_lines_count_ties_as_shown_and_finished_lines_only(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, accuracies(0.1, 0.9001)),
        job("b", 0, accuracies(0.1, 0.9002)),
        job("c", 0, accuracies(0.1, 0.5)),
        job("d", 0, accuracies(0.1, 0.99), "diverged"),
    ]
    rows = load_record(write_run(tmp_path / "run", jobs)).final_table()
    assert words.best_lines(rows, "test_accuracy") == {0, 1}
    assert words.best_lines(rows, "train_loss") == {1}
    assert words.best_lines(rows, "payload_bytes") == set()
    assert words.best_lines(rows[:2], "test_accuracy") == set()  # shown alike: nobody is best


# --- verdict and troubles ---------------------------------------------------------------------------------


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_verdict(good_run: RunRecord) -> None:
    assert plain(verdict([good_run])) == (
        "After 20 rounds, local-gecl reaches 92.0 ± 2.8 % mean test accuracy; gossip 55.0 ± 7.1 %."
    )
    assert troubles(good_run) == []


def test_verdict_of_a_sweep_names_the_best_setting(troubled_run: RunRecord) -> None:
    assert plain(verdict([troubled_run])) == (
        "After 20 rounds, local-gecl lr=0.1 reaches 92.0 ± 2.8 % mean test accuracy "
        "(the best setting of each algorithm)."
    )


def test_problems_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    jobs = [
        job(algorithm, 0, accuracies(0.1, 0.2, final), axes={"problem.partition.h": h})
        for algorithm, h, final in [("a", "0.1", 0.5), ("b", "0.1", 0.4), ("a", "10", 0.8), ("b", "10", 0.9)]
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    assert plain(verdict([record])) == (
        "With h=0.1, after 20 rounds, a reaches 50.0 % mean test accuracy; b 40.0 %. "
        "With h=10, after 20 rounds, b reaches 90.0 % mean test accuracy; a 80.0 %."
    )
    assert [row.label for row in record.final_table()] == ["a h=0.1", "b h=0.1", "a h=10", "b h=10"]
    assert words.best_lines(record.final_table(), "test_accuracy") == {0, 3}


def test_verdict_without_accuracy_goes_by_the_loss(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, [{"round": 20, "train_loss": 0.5}]),
        job("b", 0, [{"round": 10, "train_loss": 0.25}], "running"),
    ]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=("train_loss",)))
    assert plain(verdict([record])) == "b reaches 0.25 training loss (round 10); a 0.5 (round 20)."


def test_verdict_when_there_is_little_to_say(tmp_path: Path) -> None:
    waiting = load_record(write_run(tmp_path / "waiting", [job("a", 0, [], "pending")], status="running"))
    assert verdict([waiting]) == "Nothing was recorded yet."
    assert "Nothing was recorded yet." in " ".join(Page(report_html([waiting])).words)
    assert "a: not started" in printed([waiting])
    diverged = load_record(write_run(tmp_path / "diverged", [job("a", 0, accuracies(0.1), "diverged")]))
    assert verdict([diverged]) == "Every algorithm diverged."


def test_troubles(troubled_run: RunRecord) -> None:
    assert troubles(troubled_run) == [
        "This run was interrupted: of 8 jobs, 4 done, 1 diverged, 1 unfinished, 2 not started; "
        "'holdfast resume troubled' continues it.",
        "<b>&gossip lr=0.1 seed 1 diverged: NaN: <smaller> lr",
    ]


# --- the terminal -----------------------------------------------------------------------------------------


def test_table_in_the_terminal(good_run: RunRecord) -> None:
    lines = printed([good_run]).splitlines()
    assert " ".join(lines[3].split()) == "local-gecl 20 92.0±2.8 0.08 0.01 20.0 MiB 2,000 10.0 s"
    assert " ".join(lines[4].split()) == "gossip 20 55.0±7.1 0.45 0.01 10.0 MiB 2,000 10.0 s"
    assert lines[5].startswith("Means over 2 seeds; accuracy ± its sample standard deviation.")
    table = summary_table([good_run])
    accuracy = list(table.columns[2].cells)
    assert [cell.style for cell in accuracy] == ["bold", ""]


def test_troubles_in_the_terminal(troubled_run: RunRecord) -> None:
    text = printed([troubled_run])
    assert "<b>&gossip lr=0.1: 1 of 2 seeds diverged at round 20" in text
    assert "<b>&gossip lr=0.01: 2 of 2 seeds unfinished" in text
    assert re.search(r"<b>&gossip lr=0\.1 +2 +10/20 ", text)


def test_default_metrics_fit_and_narrow_terminals_lose_columns_aloud(tmp_path: Path) -> None:
    rows = [{"round": 20, **dict.fromkeys(DEFAULT_METRICS, 0.51234)}]
    jobs = [job("local-gecl", seed, [rows[0] | {"test_accuracy": 0.5 + 0.1 * seed}]) for seed in (0, 1)]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=tuple(DEFAULT_METRICS)))
    wide = summary_table([record], width=100)
    assert len(wide.columns) == 2 + len(DEFAULT_METRICS) + 3
    assert max(map(len, printed([record], width=100).splitlines())) <= 100
    narrow = printed([record], width=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert "Not shown for lack of width, but in the report: test loss, gradients" in " ".join(narrow.split())
    assert "55.0±7.1" in narrow


@pytest.mark.parametrize(
    ("dataset", "metrics", "remedy"),
    [
        ('{ name = "csv", file = "a.csv", target = "y" }', "default", "test_file in [problem.dataset]"),
        ('{ name = "image-folder", folder = "a" }', "default", "test_folder in [problem.dataset]"),
        ('{ name = "npz", file = "a.npz" }', "default", "add x_test and y_test to the file"),
        ('"mine:load"', "default", "mine:load can return hf.TrainTest(train, test)"),
        ('"quadratics"', "default", None),  # nothing is learned there
        ('{ name = "csv", file = "a.csv", target = "y" }', "chosen", None),
    ],
)
def test_missing_test_data_are_told_with_the_remedy(
    tmp_path: Path, dataset: str, metrics: str, remedy: str | None
) -> None:
    chosen = 'metrics = ["train_loss"]\n' if metrics == "chosen" else ""
    experiment = f"rounds = 20\nseeds = [0]\n{chosen}[problem]\ndataset = {dataset}\n"
    rows = [{"round": 20, "train_loss": 0.5}]
    told = {}
    for count in (0, 5):
        folder = tmp_path / str(count)
        write_run(folder, [job("fedavg", 0, rows)], metrics=("train_loss",), experiment=experiment)
        summary = json.loads((folder / "summary.json").read_text())
        summary["facts"]["test_samples"] = count
        (folder / "summary.json").write_text(json.dumps(summary))
        told[count] = untested([load_record(folder)])
    assert told[5] == ""
    if remedy is None:
        assert told[0] == ""
        return
    assert told[0].startswith("There are no test data, ")
    assert told[0].endswith(f"{remedy}.")
    record = load_record(tmp_path / "0")
    assert told[0] in " ".join(printed([record]).split())
    assert told[0] in Page(report_html([record])).words
