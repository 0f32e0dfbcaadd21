"""Run directories read back: averages over seeds, and what a damaged one gets."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sample_run import MIB, accuracies, job, troubled_sweep, two_algorithms, write_run

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import RunRecord, Series, load_record, overlaid
from holdfast.experiments.record_files import short


def curve(record: RunRecord, label: str, metric: str = "test_accuracy", axis: str = "round") -> Series:
    return next(series for series in record.series(metric, axis) if series.label == label)


def test_everything_is_read(tmp_path: Path) -> None:
    record = load_record(two_algorithms(tmp_path / "run"))
    assert record.name == "sample"
    assert record.config["problem"]["nodes"] == 3
    assert record.config_text.startswith('name = "sample"')
    assert record.environment["python"] == "3.11.2"
    assert record.metrics == ["test_accuracy", "train_loss", "consensus"]
    assert record.axes == []
    assert len(record.rows) == 12
    assert record.rows[1]["payload_bytes"] == 10 * MIB
    assert record.partition.classes == ["cat", "dog"]
    assert record.partition.samples.tolist() == [7, 5, 4]
    np.testing.assert_array_equal(record.partition.counts, [[3, 4], [5, 0], [0, 4]])
    assert record.links == [(0, 1, 0.5), (0, 2, 0.25), (1, 2, 0.25)]


def test_series_are_means_and_extents_over_seeds(tmp_path: Path) -> None:
    found = curve(load_record(two_algorithms(tmp_path / "run")), "local-gecl")
    assert found.x == [0, 10, 20]
    assert found.mean == pytest.approx([0.1, 0.75, 0.92], abs=1e-15)
    assert found.low == [0.1, 0.7, 0.9]
    assert found.high == [0.1, 0.8, 0.94]
    assert (found.seeds, found.diverged, found.note) == (2, False, "")


def test_series_against_bytes(tmp_path: Path) -> None:
    record = load_record(two_algorithms(tmp_path / "run"))
    assert curve(record, "local-gecl", axis="payload_bytes").x == [0, 10 * MIB, 20 * MIB]
    assert curve(record, "gossip", axis="payload_bytes").x == [0, 5 * MIB, 10 * MIB]


def test_a_diverged_seed_ends_the_curve(tmp_path: Path) -> None:
    found = curve(load_record(troubled_sweep(tmp_path / "run")), "<b>&gossip lr=0.1")
    assert found.x == [0, 10]
    assert found.mean == pytest.approx([0.1, 0.45], abs=1e-15)
    assert found.diverged
    assert found.note == "1 of 2 seeds diverged at round 20"


def test_a_stopped_seed_does_not_count_beside_a_finished_one(tmp_path: Path) -> None:
    found = curve(load_record(troubled_sweep(tmp_path / "run")), "local-gecl lr=0.01")
    assert (found.x, found.mean, found.seeds) == ([0, 10, 20], [0.1, 0.4, 0.6], 1)
    assert found.note == "1 of 2 seeds unfinished"


def test_stopped_seeds_alone_count_to_the_round_they_share(tmp_path: Path) -> None:
    jobs = [job("a", 0, accuracies(0.1, 0.2, 0.3), "running"), job("a", 1, accuracies(0.1, 0.4), "running")]
    found = curve(load_record(write_run(tmp_path / "run", jobs, status="interrupted")), "a")
    assert found.x == [0, 10]
    assert found.mean == pytest.approx([0.1, 0.3], abs=1e-15)


def test_a_metric_that_does_not_apply_leaves_an_empty_curve(tmp_path: Path) -> None:
    rows = [{"round": 0, "train_loss": 1.0}, {"round": 10, "train_loss": 0.5}]
    record = load_record(write_run(tmp_path / "run", [job("a", 0, rows), job("b", 0, accuracies(0.1, 0.2))]))
    assert curve(record, "a").x == []
    assert curve(record, "a", "train_loss").mean == [1.0, 0.5]
    assert "test_accuracy" not in record.final_table()[0].values


def test_final_table(tmp_path: Path) -> None:
    gecl, gossip = load_record(two_algorithms(tmp_path / "run")).final_table()
    assert (gecl.label, gecl.seeds, gecl.round, gecl.rounds, gecl.status) == ("local-gecl", 2, 20, 20, "done")
    # The sample standard deviation of two values is their difference over sqrt(2).
    assert gecl.values["test_accuracy"] == pytest.approx((0.92, 0.04 / math.sqrt(2)), abs=1e-15)
    assert gecl.values["payload_bytes"] == (20 * MIB, 0)
    assert gecl.values["gradient_evaluations"].mean == 2000
    assert gecl.values["seconds"].mean == 10
    assert gossip.values["test_accuracy"].mean == pytest.approx(0.55, abs=1e-15)
    assert gossip.best_accuracy == pytest.approx((0.6, 0), abs=1e-15)  # each seed's best, in different rounds


def test_final_table_of_a_troubled_run(tmp_path: Path) -> None:
    rows = {row.label: row for row in load_record(troubled_sweep(tmp_path / "run")).final_table()}
    assert [row.status for row in rows.values()] == ["done", "unfinished", "diverged", "pending"]
    diverged = rows["<b>&gossip lr=0.1"]
    assert diverged.round == 10
    assert diverged.values["train_loss"].mean == pytest.approx(0.55, abs=1e-15)
    waiting = rows["<b>&gossip lr=0.01"]
    assert (waiting.round, waiting.values, waiting.best_accuracy) == (None, {}, None)
    assert rows["local-gecl lr=0.01"].values["test_accuracy"] == (0.6, None)


def with_recall(rows: list[dict], *recalls: float) -> list[dict]:
    return [row | {"recall_node1": recall} for row, recall in zip(rows, recalls, strict=True)]


NAN = math.nan
METRICS = ("test_accuracy", "train_loss", "consensus", "recall_node1")


def test_an_undefined_figure_hides_no_other(tmp_path: Path) -> None:
    """One node has no sample of a class, so that the recall there is 0/0, in one seed or in all rounds."""
    jobs = [
        job("a", 0, with_recall(accuracies(0.1, 0.8, 0.9), 0.5, 0.5, NAN)),
        job("a", 1, with_recall(accuracies(0.1, 0.7, 0.94), 0.5, 0.7, 0.9)),
        job("b", 0, with_recall(accuracies(0.1, 0.5, 0.6), NAN, NAN, NAN)),
    ]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=METRICS))
    a, b = record.final_table()
    assert (a.round, b.round) == (20, 20)
    assert a.values["test_accuracy"].mean == pytest.approx(0.92, abs=1e-15)
    assert a.best_accuracy.mean == pytest.approx(0.92, abs=1e-15)
    assert math.isnan(a.values["recall_node1"].mean)
    assert a.values["recall_node1"].std is None
    assert [bool(a.defined(name)) for name in ("test_accuracy", "recall_node1", "nothing")] == [
        True,
        False,
        False,
    ]
    assert curve(record, "a").x == curve(record, "b").x == [0, 10, 20]
    assert curve(record, "a", "recall_node1").x == [0, 10]
    assert curve(record, "b", "recall_node1").x == []


def test_a_row_that_diverged_does_not_count_beside_figures_that_were_never_defined(tmp_path: Path) -> None:
    rows = with_recall(accuracies(0.1, 0.8, 0.9), NAN, NAN, NAN)
    rows[-1] |= {"train_loss": math.inf, "consensus": 1e300}
    record = load_record(write_run(tmp_path / "run", [job("a", 0, rows, "diverged")], metrics=METRICS))
    assert record.final_table()[0].round == 10
    assert curve(record, "a", "consensus").x == [0, 10]


def test_notes_of_single_seeds(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, accuracies(0.1, 0.2), "running"),
        job("b", 0, [], "pending"),
        job("c", 0, accuracies(0.1, 0.2), "diverged"),
    ]
    rows = load_record(write_run(tmp_path / "run", jobs, status="interrupted")).final_table()
    assert [row.note for row in rows] == ["unfinished, at round 10", "not started", "diverged at round 10"]


def test_axes_with_one_short_name_keep_their_full_names(tmp_path: Path) -> None:
    axes = {"problem.model.name": "mlp", "problem.partition.name": "iid", "algorithm.lr": ""}
    jobs = [job("a", 0, accuracies(0.1), axes=axes)]
    record = load_record(write_run(tmp_path / "run", jobs, axes=tuple(axes)))
    assert record.series("test_accuracy")[0].label == "a problem.model.name=mlp problem.partition.name=iid"


def test_several_runs_are_told_apart(tmp_path: Path) -> None:
    first = load_record(two_algorithms(tmp_path / "one", name="first"))
    second = load_record(two_algorithms(tmp_path / "two", name="second"))
    third = load_record(two_algorithms(tmp_path / "three", name="first"))
    assert [record.prefix for record in overlaid([first])] == [""]
    assert [record.final_table()[0].label for record in overlaid([first, second])] == [
        "first: local-gecl",
        "second: local-gecl",
    ]
    assert [record.prefix for record in overlaid([first, third])] == ["one: ", "three: "]
    with pytest.raises(HoldfastError, match="given twice"):
        overlaid([first, load_record(tmp_path / "one" / ".." / "one")])
    with pytest.raises(HoldfastError, match="at least one"):
        overlaid([])


def test_swept_values_in_a_few_characters() -> None:
    assert short({"name": "dirichlet", "h": 0.1}) == "dirichlet(h=0.1)"
    assert short({"name": "iid"}) == "iid"
    assert short(0.001) == "0.001"


def test_unknown_metric(tmp_path: Path) -> None:
    record = load_record(two_algorithms(tmp_path / "run"))
    with pytest.raises(HoldfastError, match="did you mean 'test_accuracy'"):
        record.series("test_acuracy")


def test_a_line_cut_off_by_a_crash_does_not_count(tmp_path: Path) -> None:
    jobs = [job("a", 0, accuracies(0.1, 0.8)), job("b", 0, accuracies(0.1, 0.5), "running")]
    folder = write_run(tmp_path / "run", jobs, status="running")
    file = folder / "metrics.csv"
    file.write_text(file.read_text().rstrip("\n")[:-20])
    assert len(load_record(folder).rows) == 3


@pytest.mark.parametrize("last_line", ["cut off", "missing"])
def test_a_finished_job_without_its_last_round_is_damage(tmp_path: Path, last_line: str) -> None:
    folder = two_algorithms(tmp_path / "run")
    file = folder / "metrics.csv"
    text = file.read_text().rstrip("\n")
    file.write_text(text[:-20] if last_line == "cut off" else text[: text.rfind("\n") + 1])
    with pytest.raises(HoldfastError, match=r"metrics\.csv is damaged: 'gossip 1' is done, .* 20, is not"):
        load_record(folder)


FILES = ["experiment.toml", "environment.json", "summary.json", "metrics.csv", "partition.csv", "network.csv"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = two_algorithms(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(HoldfastError, match=f"run is not a run directory: {name} is missing"):
        load_record(folder)


@pytest.mark.parametrize("name", FILES)
def test_bytes_that_are_not_text(tmp_path: Path, name: str) -> None:
    folder = two_algorithms(tmp_path / "run")
    (folder / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HoldfastError, match=f"{name} is damaged: it is not text"):
        load_record(folder)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="nowhere is not a run directory"):
        load_record(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("experiment.toml", "rounds = 20", "rounds =", "experiment.toml is damaged: .*line 2"),
        ("environment.json", "{", "", "environment.json is damaged: "),
        ("environment.json", "{", "[" * 100_000, "environment.json is damaged: maximum recursion depth"),
        (
            "environment.json",
            '{"python": "3.11.2", "note": "a <b> & c"}',
            "[1]",
            "should be a valid dictionary",
        ),
        ("summary.json", '"jobs"', '"job"', "summary.json is damaged: jobs: Field required"),
        ("summary.json", '"done"', '"finished"', "jobs: 0: status: Input should be 'done'"),
        ("summary.json", '"gossip"', '"whisper"', "has rows of 'gossip 0', which summary.json does not know"),
        ("metrics.csv", "algorithm,seed", "seed,algorithm", "not the header of a table of metrics"),
        ("metrics.csv", "consensus,", "", "metrics.csv line 2 is damaged: 11 values under 10 headings"),
        ("metrics.csv", "0.8,", "high,", "line 3 is damaged: test_accuracy should be a number, got 'high'"),
        ("metrics.csv", "gossip,0,10", "gossip,0,1e1", "line 9 is damaged: round should be a whole number"),
        (
            "metrics.csv",
            "gossip,0,20",
            "gossip,0,10",
            "line 10 is damaged: this round of this job stands there twice",
        ),
        ("partition.csv", "node,", "nodes,", "partition.csv is damaged: its first line"),
        ("partition.csv", "1,5", "3,5", "one line for every node"),
        ("partition.csv", "7", "seven", "samples should be a whole number, got 'seven'"),
        ("network.csv", "i,j", "from,to", "network.csv is damaged: its first line"),
        ("network.csv", "0,1,0.5", "0,1,", "line 2 is damaged: the weight is missing"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    folder = two_algorithms(tmp_path / "run")
    text = (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new))
    with pytest.raises(HoldfastError, match=message) as caught:
        load_record(folder)
    assert "\n" not in str(caught.value)


def test_an_empty_table(tmp_path: Path) -> None:
    folder = two_algorithms(tmp_path / "run")
    (folder / "network.csv").write_text("")
    with pytest.raises(HoldfastError, match=r"network\.csv is damaged: it is empty"):
        load_record(folder)


def test_a_summary_with_more_in_it_is_fine(tmp_path: Path) -> None:
    folder = two_algorithms(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"data_dir": None, "digest": "abc", "new": 1}))
    assert load_record(folder).summary["data_dir"] is None
