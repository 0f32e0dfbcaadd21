"""NET-FLEET's experiments: presets that can be run, claims that can fail, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_checks import planned
from sample_run import job, write_run

from holdfast.experiments.record import load_record
from holdfast.problem.optimum import known_optimum
from holdfast_papers.base import Layout, Verdict
from holdfast_papers.drawing import draw
from holdfast_papers.evidence import Evidence
from holdfast_papers.net_fleet import PAPER
from holdfast_papers.net_fleet.comparisons import (
    ONE_GRADIENT,
    at_full_scale,
    final_accuracies,
    lead_over,
    leads,
    like_ld_sgd,
)
from holdfast_papers.net_fleet.schedules import printed_lead
from holdfast_papers.net_fleet.sweeps import alike, level, no_worse, rises, spread
from holdfast_papers.net_fleet.theory import (
    THEOREM_1,
    becomes_stationary,
    gradient_tracking,
    graph,
    identities,
    is_tracking,
    keeps_mean,
    linear_speedup,
    regression,
    slopes,
)

METRICS = ("average_accuracy", "test_accuracy")


def rows(average: float, own: float = 0.5) -> list[dict]:
    """An accuracy of 0.1 at the start, and these at the end."""
    return [
        {"round": 0, "average_accuracy": 0.1, "test_accuracy": 0.1},
        {"round": 20, "average_accuracy": average, "test_accuracy": own},
    ]


def comparison(folder: Path, scale: str, iid: dict[str, float], shards: dict[str, float]) -> Evidence:
    """Final accuracies of the four methods; nodes' own models are 0.1 below the average model."""
    jobs = [
        job(method, 0, rows(value, value - 0.1), axes={"problem.partition": split})
        for split, values in (("iid", iid), ("shards", shards))
        for method, value in values.items()
    ]
    record = load_record(write_run(folder / "run", jobs, axes=("problem.partition",), metrics=METRICS))
    return Evidence(scale, {"figure-1": record})


def sweep(folder: Path, scale: str, key: str, iid: list[float], shards: list[float]) -> Evidence:
    jobs = [
        job("net-fleet", 0, rows(value), axes={"problem.partition": split, key: place + 1})
        for split, values in (("iid", iid), ("shards", shards))
        for place, value in enumerate(values)
    ]
    record = load_record(write_run(folder / "run", jobs, axes=("problem.partition", key), metrics=METRICS))
    return Evidence(scale, {"figure-4": record})


PAPERS_ORDER = {"net-fleet": 0.95, "ld-sgd": 0.90, "gt-sgd": 0.87, "dsgd": 0.86}


# --- presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("experiment", [e for e in PAPER.experiments if e.presets], ids=lambda e: e.id)
def test_presets_expand(experiment, scale):
    for _, jobs in planned(PAPER, experiment, scale):
        assert {job.spec.problem.partition.name for job in jobs} == {"iid", "shards"}
        assert all(job.spec.network.mixing.name == "laplacian" for job in jobs)
        if scale == "full" and experiment.id != "figure-2":
            assert all(job.spec.rounds == 1000 for job in jobs)
            assert all(job.spec.problem.model.name == "netfleet-cnn" for job in jobs)


def test_the_sweeps_are_the_papers_at_full_scale():
    wanted = {
        "figure-3": ("algorithm.local_steps", [1, 8, 10, 20]),
        "figure-4": ("problem.nodes", [10, 30, 50, 70]),
        "figure-5": ("network.topology.p", [0.1, 0.3, 0.5, 0.9]),
        "figure-6": ("algorithm.lr", [0.0005, 0.001, 0.005, 0.01]),
    }
    for id, (key, values) in wanted.items():
        ((_, jobs),) = planned(PAPER, PAPER.experiment(id), "full")
        assert sorted({job.axes[key] for job in jobs}) == values


def test_fig_2_has_the_papers_steps_batches_and_rounds():
    ((_, jobs),) = planned(PAPER, PAPER.experiment("figure-2"), "full")
    for one in jobs:
        assert one.config.parameters["lr"] == 0.001
        assert (one.spec.problem.batch_size, one.spec.rounds) == (128, 500)


def test_gt_sgd_is_adapt_then_combine_as_in_the_paper_it_is_from():
    for id in ("figure-1", "figure-2", "figure-1-constant"):
        ((_, jobs),) = planned(PAPER, PAPER.experiment(id), "full")
        assert {j.config.parameters["order"] for j in jobs if j.label == "gt-sgd"} == {"atc"}


@pytest.mark.parametrize("id", ["figure-1-constant", "figure-3-halved", "figure-6-halved"])
def test_second_readings_differ_in_their_steps_only(id):
    ((_, second),), ((_, first),) = (planned(PAPER, PAPER.experiment(name), "full") for name in (id, id[:8]))
    for one, other in zip(*([j for j in jobs if j.seed == 0] for jobs in (second, first)), strict=True):
        assert one.spec.problem == other.spec.problem
        assert one.spec.network == other.spec.network
    assert {claim.kind for claim in PAPER.experiment(id).claims} == {"ours"}


def test_one_step_per_round_is_a_curve_of_figure_3_over_more_seeds():
    ((_, more),), ((_, jobs),) = (
        planned(PAPER, PAPER.experiment(id), "full") for id in ("figure-3-one-step", "figure-3")
    )
    assert {one.seed for one in more} == set(range(5))
    one_step = [one for one in jobs if one.axes["algorithm.local_steps"] == 1]
    for ours, theirs in zip([one for one in more if one.seed == 0], one_step, strict=True):
        assert ours.spec.problem == theirs.spec.problem
        assert ours.spec.network == theirs.spec.network
        assert ours.config == theirs.config


# --- claims ------------------------------------------------------------------------------------------------


def test_leads_asks_for_points_or_for_the_sign(tmp_path):
    shown = comparison(tmp_path, "full", PAPERS_ORDER, PAPERS_ORDER)
    assert lead_over(shown, "shards", ONE_GRADIENT, "average_accuracy") == pytest.approx([8])
    assert leads("shards", ("ld-sgd",), 2)(shown).verdict == Verdict.PASS
    assert leads("shards", ("ld-sgd",), 6)(shown).verdict == Verdict.FAIL
    assert leads("shards", ("ld-sgd",), 2, "test_accuracy")(shown).ours == "5.00 points"
    at_small = Evidence("small", shown.runs)
    assert leads("shards", ("ld-sgd",), 6)(at_small).verdict == Verdict.FAIL
    assert leads("shards", ("ld-sgd",), 0)(at_small).verdict == Verdict.PASS
    behind = comparison(tmp_path / "b", "small", PAPERS_ORDER, {**PAPERS_ORDER, "ld-sgd": 0.96})
    assert leads("shards", ("ld-sgd",), 0)(behind).verdict == Verdict.FAIL


def test_like_ld_sgd(tmp_path):
    near = {**PAPERS_ORDER, "ld-sgd": 0.94}
    assert like_ld_sgd(1.5)(comparison(tmp_path / "a", "full", near, near)).verdict == Verdict.PASS
    assert like_ld_sgd(1.5)(comparison(tmp_path / "b", "full", PAPERS_ORDER, near)).verdict == Verdict.FAIL
    assert like_ld_sgd(None)(comparison(tmp_path / "c", "full", PAPERS_ORDER, near)).verdict == Verdict.PASS
    far = {**PAPERS_ORDER, "ld-sgd": 0.5}
    assert like_ld_sgd(1.5)(comparison(tmp_path / "d", "small", far, near)).verdict == Verdict.FAIL


def test_a_lead_as_printed(tmp_path):
    e = comparison(tmp_path, "full", PAPERS_ORDER, PAPERS_ORDER)  # 8 points over the two with one gradient
    assert printed_lead(ONE_GRADIENT, 8, 4)(e).verdict == Verdict.PASS
    assert printed_lead(ONE_GRADIENT, 13, 4)(e).verdict == Verdict.FAIL
    assert printed_lead(ONE_GRADIENT, 3, 4)(e).verdict == Verdict.FAIL
    assert printed_lead(ONE_GRADIENT, 8, 4)(Evidence("small", e.runs)).verdict == Verdict.NOT_COMPARABLE


def test_what_only_full_scale_decides(tmp_path):
    e = comparison(tmp_path, "full", PAPERS_ORDER, PAPERS_ORDER)
    check = at_full_scale(leads("iid", ("ld-sgd",), 0), "too small")
    assert check(e).verdict == Verdict.PASS
    assert check(Evidence("small", e.runs)) == (Verdict.NOT_COMPARABLE, "5.00 points", "too small", "")


def test_the_table_has_both_splits_and_both_measures(tmp_path):
    header, lines = final_accuracies(comparison(tmp_path, "small", PAPERS_ORDER, PAPERS_ORDER))
    assert len(header) == 5
    assert lines[0] == ["NET-FLEET", "95.00", "85.00", "95.00", "85.00"]


@pytest.mark.parametrize(
    ("shards", "verdict"),
    [
        ([0.925, 0.95, 0.945, 0.975], Verdict.PASS),
        ([0.925, 0.95, 0.93, 0.975], Verdict.FAIL),  # falls by 2 points on the way
        ([0.925, 0.93, 0.935, 0.925], Verdict.FAIL),  # ends where it began
    ],
)
def test_rises(tmp_path, shards, verdict):
    check = rises("nodes", ["shards"], slack=1)
    assert check(sweep(tmp_path, "full", "problem.nodes", [0.95] * 4, shards)).verdict == verdict


@pytest.mark.parametrize(
    ("shards", "verdict"),
    [([0.9, 0.9, 0.91], Verdict.PASS), ([0.9, 0.899, 0.91], Verdict.FAIL), ([0.9] * 3, Verdict.FAIL)],
)
def test_rises_without_slack_never_goes_down(tmp_path, shards, verdict):
    found = rises("lr", ["shards"], slack=0)(sweep(tmp_path, "full", "algorithm.lr", [0.9] * 3, shards))
    assert found.verdict == verdict
    assert found.reason == "up from end to end, never down"


def test_no_worse_compares_the_ends(tmp_path):
    check = no_worse("nodes", "shards", slack=0.5)
    assert (
        check(sweep(tmp_path / "a", "full", "problem.nodes", [0.9] * 3, [0.9, 0.8, 0.896])).verdict == "PASS"
    )
    assert (
        check(sweep(tmp_path / "b", "full", "problem.nodes", [0.9] * 3, [0.9, 0.95, 0.89])).verdict == "FAIL"
    )


def test_levels_are_for_full_scale(tmp_path):
    found = sweep(tmp_path, "full", "algorithm.lr", [0.74, 0.8, 0.9, 0.93], [0.79, 0.8, 0.9, 0.91])
    low, high = slice(1), slice(-1, None)
    assert level("lr", "iid", low, high=75)(found).verdict == Verdict.PASS
    assert level("lr", "shards", low, high=75)(found).verdict == Verdict.FAIL
    assert level("lr", "iid", high, low=95)(found).verdict == Verdict.PASS
    assert level("lr", "shards", high, low=95)(found).verdict == Verdict.FAIL
    small = Evidence("small", found.runs)
    assert level("lr", "shards", high, low=95)(small).verdict == Verdict.NOT_COMPARABLE


def test_spread_and_alike(tmp_path):
    found = sweep(tmp_path, "full", "problem.nodes", [0.95, 0.955, 0.958], [0.9, 0.95, 0.96])
    assert spread("nodes", "iid", 1)(found).verdict == Verdict.PASS
    assert spread("nodes", "shards", 4)(found).verdict == Verdict.FAIL
    assert alike(found).verdict == Verdict.PASS
    assert alike(Evidence("small", found.runs)).verdict == Verdict.PASS
    uneven = sweep(tmp_path / "b", "full", "problem.nodes", [0.9, 0.955, 0.958], [0.95, 0.95, 0.96])
    assert alike(uneven).verdict == Verdict.FAIL
    assert alike(Evidence("small", uneven.runs)).verdict == Verdict.FAIL


@pytest.mark.parametrize(
    ("iid", "verdict"),
    [
        ([0.945, 0.95, 0.9595], Verdict.PASS),
        ([0.945, 0.95, 0.961], Verdict.FAIL),  # 1.6 points apart, though all are above 94 %
        ([0.939, 0.95, 0.95], Verdict.FAIL),  # 1.1 points apart, but one is below
    ],
)
def test_alike_at_full_scale_asks_for_level_and_spread(tmp_path, iid, verdict):
    assert alike(sweep(tmp_path, "full", "problem.nodes", iid, [0.5, 0.7, 0.9])).verdict == verdict


# --- what is computed --------------------------------------------------------------------------------------


def floors(power: float) -> Evidence:
    sizes = (4, 8, 16, 32)
    rows = [
        {"what": "noise floor", "n": n, "seed": seed, "floor": (3.0 + seed) * n**power}
        for n in sizes
        for seed in (0, 1)
    ]
    return Evidence("small", {}, rows)


def test_slope_of_the_noise_floor():
    assert slopes(floors(-1)) == pytest.approx([-1, -1])
    assert linear_speedup(floors(-1)).verdict == Verdict.PASS
    assert linear_speedup(floors(-0.5)).verdict == Verdict.FAIL  # as without averaging of all the noise
    assert linear_speedup(floors(0)).verdict == Verdict.FAIL


def test_gradient_tracking_written_out_finds_the_optimum_of_heterogeneous_nodes():
    problem = regression(6, 0, batch_size=None)
    *_, last = gradient_tracking(problem, graph(6, 0), lr=0.1, rounds=800)
    assert float((last - known_optimum(problem).x).abs().max()) < 1e-10


def test_the_figure_says_the_slope_and_writes_out_the_numbers_of_nodes():
    ideal = [{"what": "1/n", "n": n, "floor": 1 / n} for n in (4, 8, 16, 32)]
    panel = THEOREM_1.layout.panels[0]
    figure = draw(Layout([panel]), Evidence("small", {}, [*floors(-0.9).rows, *ideal]))
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["NET-FLEET, minibatches: slope -0.90", "1/n: slope -1.00"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["4", "8", "16", "32"]


def test_identities_hold_and_are_told_from_those_that_do_not():
    found = Evidence("small", {}, identities())
    assert keeps_mean(found).verdict == is_tracking(found).verdict == Verdict.PASS
    broken = Evidence("small", {}, [{**row, "value": 1e-6} for row in found.rows])
    assert keeps_mean(broken).verdict == is_tracking(broken).verdict == Verdict.FAIL


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [(1e-15, 0.1, Verdict.PASS), (1e-3, 0.1, Verdict.FAIL), (1e-15, 1e-15, Verdict.FAIL)],
)
def test_becoming_stationary(ours, theirs, verdict):
    ends = {"NET-FLEET": ours, "LD-SGD": theirs}
    found = [
        {"what": f"{name}, exact gradients", "round": round, "stationarity": value}
        for name, end in ends.items()
        for round, value in enumerate(np.geomspace(1, end, 5))
    ]
    assert becomes_stationary(Evidence("small", {}, found)).verdict == verdict
