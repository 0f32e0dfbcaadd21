"""What the script of a page is given, of small runs whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_page import Page
from sample_run import EXPERIMENT, MIB, accuracies, job, write_run

from holdfast.experiments.record import RunRecord, load_record, overlaid
from holdfast.report.html import report_html
from holdfast.report.page_data import (
    LINKS_UP_TO,
    curves_data,
    json_in_html,
    network_data,
    rows_data,
    setting_data,
)
from holdfast.report.tuning import sweep_data, swept
from holdfast.report.verdict import differences


def test_rows_and_which_make_a_curve(good_run: RunRecord) -> None:
    about, rows = curves_data([good_run]), rows_data([good_run])
    assert about["columns"] == [
        *("round", "payload_bytes", "gradient_evaluations", "seconds"),
        *("test_accuracy", "train_loss", "consensus"),
    ]
    assert rows[1] == [0, 10, 10 * MIB, 1000, 5.0, 0.8, pytest.approx(0.2), 0.1]
    assert len(rows) == 12
    assert [(curve["label"], curve["jobs"]) for curve in about["curves"]] == [
        ("local-gecl", [0, 1]),
        ("gossip", [2, 3]),
    ]
    assert [axis["name"] for axis in about["axes"]] == about["columns"][:4]


def test_seeds_that_do_not_count_and_rows_that_are_not_finite(troubled_run: RunRecord) -> None:
    curves = {curve["label"]: curve for curve in curves_data([troubled_run])["curves"]}
    assert curves["local-gecl lr=0.01"]["jobs"] == [2]  # the seed that was interrupted does not count
    assert curves["<b>&gossip lr=0.01"]["jobs"] == []
    assert curves["<b>&gossip lr=0.1"]["diverged"]
    assert [row[1] for row in rows_data([troubled_run]) if row[0] == 5] == [0, 10]  # 20 is NaN
    json.dumps(rows_data([troubled_run]), allow_nan=False)


def test_the_page_knows_what_is_undefined(tmp_path: Path) -> None:
    metrics = ("test_accuracy", "train_loss", "consensus", "recall_node0", "recall_node1")
    rows = [row | {"recall_node0": 0.5, "recall_node1": float("nan")} for row in accuracies(0.1, 0.8)]
    [record] = overlaid([load_record(write_run(tmp_path / "run", [job("a", 0, rows)], metrics=metrics))])
    about = curves_data([record])
    assert [figure["values"] for figure in about["node_figures"]] == [[0.5, None]]
    assert [row[1] for row in rows_data([record])] == [0, 10]
    json.dumps([about, rows_data([record])], allow_nan=False)


def test_jobs_of_several_runs_are_numbered_through(good_run: RunRecord, troubled_run: RunRecord) -> None:
    shown = overlaid([good_run, troubled_run])
    curves = curves_data(shown)["curves"]
    assert curves[2]["jobs"] == [4, 5]
    assert {row[0] for row in rows_data(shown)} == {*range(4), 4, 5, 6, 7, 8, 9}


def test_long_runs_are_thinned_alike_for_all_seeds_and_the_page_says_so(tmp_path: Path) -> None:
    rows = [{"round": r, "test_accuracy": 0.5, "train_loss": 0.5, "consensus": 0.1} for r in range(4501)]
    jobs = [job("a", 0, rows), job("a", 1, rows[:2000], "diverged")]
    record = load_record(write_run(tmp_path / "run", jobs))
    thin = rows_data([record], most=2000)
    first, second = ([row[1] for row in thin if row[0] == seed] for seed in (0, 1))
    assert first == list(range(0, 4501, 3))  # 1,501 of them
    assert second == [*range(0, 2000, 3), 1999]
    assert len(rows_data([record])) == 6501
    assert "one measurement in 3 is drawn; metrics.csv has all" in " ".join(Page(report_html([record])).words)


def test_many_curves_share_the_colour_of_their_method_in_shades(tmp_path: Path) -> None:
    jobs = [
        job(name, 0, accuracies(0.1), axes={"algorithm.lr": str(lr)})
        for name in ("a", "b")
        for lr in range(5)
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("algorithm.lr",)))
    curves = curves_data([record])["curves"]
    assert {curve["colour"] for curve in curves if curve["method"] == "a"} == {0}
    assert [curve["shade"] for curve in curves if curve["method"] == "b"] == [0, 0.25, 0.5, 0.75, 1]


def test_settings(good_run: RunRecord) -> None:
    setting = setting_data(good_run)
    assert setting is not None
    assert setting["samples"] == [7, 5, 4]
    assert setting["counts"] == [[3, 4], [5, 0], [0, 4]]
    np.testing.assert_allclose(setting["places"][0], [0, 1], atol=1e-4)
    assert setting["links"] == [[0, 1, 0.5], [0, 2, 0.25], [1, 2, 0.25]]


def test_networks_that_are_too_large_to_draw() -> None:
    names = [str(i) for i in range(120)]
    links = [(i, j, 0.1) for i in range(120) for j in range(i + 1, 120)]
    assert len(links) > LINKS_UP_TO
    crowded = network_data(names, links, is_server=True)
    assert (len(crowded["places"]), crowded["links"], crowded["link_count"]) == (120, [], len(links))
    wall = network_data([str(i) for i in range(1000)], [(0, 1, 1.0)], is_server=False)
    assert (wall["places"], wall["links"], wall["link_count"]) == ([], [], 1)


def test_figures_of_single_nodes_are_means_over_seeds(tmp_path: Path) -> None:
    rows = [
        [{"round": r, "accuracy_node0": 0.2 + s, "accuracy_node1": 0.4 + s} for r in (0, 20)]
        for s in (0, 0.2)
    ]
    metrics = ("accuracy_node0", "accuracy_node1")
    jobs = [job("a", seed, rows[seed]) for seed in (0, 1)]
    record = load_record(write_run(tmp_path / "run", jobs, metrics=metrics))
    about = curves_data([record])
    assert about["metrics"] == []  # thousands of nodes would be thousands of figures
    assert about["node_figures"] == [
        {"record": 0, "title": "accuracy with a", "kind": "accuracy", "values": [0.3, 0.5]}
    ]
    assert "accuracy_node0" not in about["columns"]


def test_a_script_element_cannot_be_left() -> None:
    text = json_in_html({"label": "</script><img src=x onerror=alert(1)>&"})
    assert not set("<>&") & set(text)
    assert json.loads(text)["label"].startswith("</script>")


# --- sweeps -----------------------------------------------------------------------------------------------


def sweep(folder: Path, finals: dict[tuple[str, str], float], **options: object) -> RunRecord:
    jobs = [
        job(name, 0, accuracies(0.1, 0.2, final), axes={"algorithm.lr": lr})
        for (name, lr), final in finals.items()
    ]
    return load_record(write_run(folder, jobs, axes=("algorithm.lr",), **options))


def test_a_sweep_says_which_value_is_best_and_whether_it_lies_at_an_edge(tmp_path: Path) -> None:
    finals = {("a", "0.1"): 0.5, ("a", "0.2"): 0.7, ("a", "0.4"): 0.6, ("b", "0.1"): 0.8, ("b", "0.2"): 0.7}
    record = sweep(tmp_path / "run", finals)
    [tuned] = swept([record])
    lines = {line["label"]: line for line in sweep_data(tuned)["lines"]}
    assert (lines["a"]["x"], lines["a"]["mean"]) == ([0.1, 0.2, 0.4], [0.5, 0.7, 0.6])
    assert (lines["a"]["best"], lines["a"]["edge"]) == (0.2, False)
    assert (lines["b"]["best"], lines["b"]["edge"]) == (0.1, True)
    told = " ".join(Page(report_html([record])).words)
    assert "b: the best lr, 0.1, is the smallest tried" in told
    assert "a: the best" not in told


def test_grids_of_a_tuning_are_one_line_and_repeated_values_are_not(tmp_path: Path) -> None:
    first = sweep(tmp_path / "grid-0", {("a", "0.1"): 0.5, ("a", "0.2"): 0.7})
    beyond = sweep(tmp_path / "grid-1", {("a", "0.4"): 0.6})
    [tuned] = swept(overlaid([first, beyond]))
    assert [line["x"] for line in sweep_data(tuned)["lines"]] == [[0.1, 0.2, 0.4]]
    again = sweep(tmp_path / "again", {("a", "0.1"): 0.5, ("a", "0.2"): 0.6})
    [apart] = swept(overlaid([first, again]))
    assert apart.algorithms == ["grid-0: a", "again: a"]


def test_what_is_no_sweep_over_numbers_or_not_done_yet(good_run: RunRecord, troubled_run: RunRecord) -> None:
    assert swept([good_run]) == []
    assert swept([troubled_run]) == []  # of each method one value alone has ended


# --- whether runs compare ---------------------------------------------------------------------------------


def test_runs_that_are_not_evaluated_alike_get_a_warning(tmp_path: Path) -> None:
    runs = []
    for name, every in (("first", 2), ("second", 5)):
        text = f"evaluate_every = {every}\n" + EXPERIMENT
        folder = write_run(tmp_path / name, [job("a", 0, accuracies(0.1, 0.5))], name=name, experiment=text)
        runs.append(load_record(folder))
    assert differences(runs) == [
        "These runs are not evaluated alike: evaluate_every is 2 in first, 5 in second."
    ]
    assert "not evaluated alike" in report_html(runs)
