"""DSpodFL's experiments: presets, claims that can fail, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_checks import planned
from sample_run import job, write_run

from holdfast.experiments.record import load_record
from holdfast_papers.base import Circumstances, Verdict
from holdfast_papers.drawing import draw
from holdfast_papers.dspodfl import PAPER
from holdfast_papers.dspodfl.appendix import (
    BETA,
    LABELS,
    RADIUS,
    at_equal_delay,
    compared_at,
    gains_most,
    keeps_its_lead,
    still_ahead,
)
from holdfast_papers.dspodfl.figures import (
    accuracies_at_end,
    aggregations_poor,
    ahead_at_equal_delay,
    best_per_iteration,
    larger_driver,
    saves_more_if_heterogeneous,
    saves_transmission,
    saving_is_counting,
)
from holdfast_papers.dspodfl.measures import (
    LINKS_MATTER,
    METHODS,
    PRINTED,
    Case,
    accuracy_at,
    gradients_bought,
    processing_saving,
)
from holdfast_papers.dspodfl.theory import (
    COUNTEREXAMPLE,
    EQUAL,
    NODES,
    UNEQUAL,
    Quadratics,
    gaps,
    largest_step,
    links,
    network,
    phi,
    proposition,
    proposition_suffices,
    shrinks_with_step,
)
from holdfast_papers.evidence import Evidence
from holdfast_papers.execution import Task

METRICS = ("test_accuracy", "tau_proc", "tau_trans", "tau_total", "tau_raw")
COSTS = {"dgd": (1, 1), "sporadic-aggregations": (1, 0.2), "sporadic-sgds": (0.1, 1), "dspodfl": (0.1, 0.2)}


def rows(end: float, cost: tuple[float, float], rounds: int = 100) -> list[dict]:
    """Accuracy rises on a straight line from 0 to ``end``; a round costs (processing, transmission).

    In raw units processing costs 50 times as much.
    """
    return [
        {
            "round": r,
            "test_accuracy": end * r / rounds,
            "tau_proc": cost[0] * r,
            "tau_trans": cost[1] * r,
            "tau_total": sum(cost) * r,
            "tau_raw": (50 * cost[0] + cost[1]) * r,
        }
        for r in range(0, rounds + 1, 5)
    ]


def figure(
    folder: Path, iid: dict[str, float], unlike: dict[str, float], each_end: float | None = None
) -> Evidence:
    """Final accuracies after 100 rounds; ``each_end``: that of the methods with links drawn by each end."""
    runs = {}
    for name, methods in (("figure-1", tuple(METHODS)), ("figure-1-each-end", LINKS_MATTER)):
        jobs = [
            job(
                method,
                0,
                rows(ends[method] if each_end is None or "each" not in name else each_end, COSTS[method]),
                axes={"problem.partition": split},
            )
            for split, ends in (("iid", iid), ("classes-per-node", unlike))
            for method in methods
        ]
        written = write_run(folder / name, jobs, axes=("problem.partition",), metrics=METRICS)
        runs[name] = load_record(written)
    return Evidence("full", runs)


ALIKE = dict.fromkeys(METHODS, 0.8)


# --- presets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("experiment", [e for e in PAPER.experiments if e.presets], ids=lambda e: e.id)
def test_presets_expand(experiment, scale):
    for preset, jobs in planned(PAPER, experiment, scale):
        for one in jobs:
            assert (one.spec.network.link_draws == "each-end") == preset.file.endswith("-each-end")
            assert one.spec.problem.nodes == 10
            if scale == "full":
                assert len({job.seed for job in jobs}) == 5
                assert one.config.parameters["lr"] == 0.01
                assert one.spec.problem.batch_size == 16


def test_links_drawn_by_each_end_differ_in_nothing_else(tmp_path):
    experiment = PAPER.experiment("figure-2")
    printed, released = (
        Task(PAPER, experiment, preset, Circumstances("full", "cpu", None), tmp_path)
        for preset in experiment.presets[:2]
    )
    kept = {a["label"] if "label" in a else a["name"]: a for a in printed.raw["algorithm"]}
    assert set(kept) == set(METHODS)
    assert released.raw["algorithm"] == [kept[method] for method in LINKS_MATTER]
    assert released.raw["network"] == {**printed.raw["network"], "link_draws": "each-end"}
    assert released.raw["problem"] == printed.raw["problem"]


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("figure", ["figure-1", "figure-2"])
def test_the_start_of_a_figure_differs_in_rounds_and_evaluations_only(figure, scale, tmp_path):
    experiment = PAPER.experiment(figure)
    whole, start = (
        Task(PAPER, experiment, preset, Circumstances(scale, "cpu", None), tmp_path).raw
        for preset in experiment.presets
        if preset.file in (figure, f"{figure}-start")
    )
    assert all(algorithm in whole["algorithm"] for algorithm in start["algorithm"])
    for raw in (whole, start):
        for key in ("name", "rounds", "evaluate_every", "algorithm"):
            del raw[key]
    assert start == whole


# --- Figs. 1 and 2 -----------------------------------------------------------------------------------------


def test_accuracy_is_the_mean_over_the_last_fifth(tmp_path):
    """At round 100 of a straight line to 80 %: the mean from round 80 on is that of round 90."""
    curve = Case("figure-1", "iid").curve(figure(tmp_path, ALIKE, ALIKE), "dgd")
    assert accuracy_at(curve, 100, "round") == pytest.approx([72])
    assert accuracy_at(curve, 51 * 50) == pytest.approx([36])  # raw delay of 51 a round


def test_rounds_that_take_long_are_evaluated_in_between(tmp_path):
    """DGD's start is recorded after 2 rounds too, far above the line from 0 to 5."""
    e = figure(tmp_path, ALIKE, ALIKE)
    early = rows(0.8, COSTS["dgd"])[:2]
    between = {key: 0.4 * value for key, value in early[1].items()} | {"round": 2, "test_accuracy": 0.5}
    jobs = [
        job("dgd", 0, [early[0], between, early[1]], axes={"problem.partition": split})
        for split in ("iid", "classes-per-node")
    ]
    start = load_record(write_run(tmp_path / "start", jobs, axes=("problem.partition",), metrics=METRICS))
    case = Case("figure-1", "iid")
    refined = case.curve(Evidence("full", {**e.runs, "figure-1-start": start}), "dgd")
    assert list(refined.rounds[:3]) == [0, 2, 5]
    assert accuracy_at(refined, 2, "round")[0] > 10 * accuracy_at(case.curve(e, "dgd"), 2, "round")[0]
    assert list(refined.path("test_accuracy")[0, 2:]) == list(
        case.curve(e, "dgd").path("test_accuracy")[0, 1:]
    )


@pytest.mark.parametrize(("dspodfl", "verdict"), [(0.8, Verdict.PASS), (0.05, Verdict.FAIL)])
def test_ahead_at_equal_total_delay(tmp_path, dspodfl, verdict):
    """A round of DSpodFL costs 5.2 where the others' cost 6, 50.2 and 51: with the same curve it is ahead."""
    e = figure(tmp_path, {**ALIKE, "dspodfl": dspodfl}, ALIKE)
    check = ahead_at_equal_delay(Case("figure-1", "iid"), most=1)
    assert check(e).verdict == verdict


def test_the_two_total_delays_can_disagree(tmp_path):
    """Sporadic SGDs: 6 raw and 1.1 printed a round, DSpodFL 5.2 and 0.3, at less accuracy."""
    e = figure(tmp_path, {**dict.fromkeys(METHODS, 0.01), "sporadic-sgds": 0.8, "dspodfl": 0.5}, ALIKE)
    case = Case("figure-1", "iid")
    assert ahead_at_equal_delay(case, 1)(e).verdict == Verdict.FAIL
    assert ahead_at_equal_delay(case, 1, PRINTED)(e).verdict == Verdict.PASS


def test_links_drawn_by_each_end_are_judged_with_their_own_curves(tmp_path):
    e = figure(tmp_path, ALIKE, ALIKE, each_end=0.05)
    assert ahead_at_equal_delay(Case("figure-1", "iid"), most=1)(e).verdict == Verdict.PASS
    assert ahead_at_equal_delay(Case("figure-1", "iid", True), most=1)(e).verdict == Verdict.FAIL


def test_the_larger_driver(tmp_path):
    """At equal raw delay sporadic SGDs make eight rounds where sporadic aggregations make one."""
    e = figure(tmp_path, ALIKE, ALIKE)
    case, halves = Case("figure-1", "iid"), ("sporadic-sgds", "sporadic-aggregations")
    assert larger_driver(case, *halves)(e).verdict == Verdict.PASS
    assert larger_driver(case, *reversed(halves))(e).verdict == Verdict.FAIL


def test_best_per_iteration(tmp_path):
    e = figure(tmp_path, {**ALIKE, "dgd": 0.85}, ALIKE)
    rivals = [method for method in METHODS if method != "dgd"]
    assert best_per_iteration(Case("figure-1", "iid"), "dgd", rivals)(e).verdict == Verdict.PASS
    assert best_per_iteration(Case("figure-1", "classes-per-node"), "dgd", rivals)(e).verdict == Verdict.FAIL


@pytest.mark.parametrize(
    ("aggregations", "ours", "verdict"),
    [
        (0.8, "5.00 times less", Verdict.PASS),  # both at round 95, at a fifth of the delay
        (0.75, "0.00 times less", Verdict.FAIL),  # ends below 95 % of DGD's best
    ],
)
def test_transmission_delay_until_dgds_accuracy(tmp_path, aggregations, ours, verdict):
    """DGD reaches 95 % of its best 0.8, which is 0.76, at round 95."""
    e = figure(tmp_path, {**ALIKE, "sporadic-aggregations": aggregations}, ALIKE)
    found = saves_transmission(Case("figure-1", "iid"))(e)
    assert (found.ours, found.verdict) == (ours, verdict)


def test_processing_delay_to_equal_accuracy(tmp_path):
    """Sporadic SGDs pay 0.1 for a round where DGD pays 1, with as many gradients."""
    e = figure(tmp_path / "a", ALIKE, {**ALIKE, "dgd": 0.3})
    assert gradients_bought(e, "figure-1", "iid") == pytest.approx([10])
    assert processing_saving(e, "figure-1", "iid") == pytest.approx([10])  # both at round 95
    assert processing_saving(e, "figure-1", "classes-per-node") == pytest.approx([95 / 4])  # round 40, not 95
    assert saves_more_if_heterogeneous("figure-1")(e).verdict == Verdict.PASS
    assert saving_is_counting("figure-1", "iid")(e).verdict == Verdict.PASS
    assert saving_is_counting("figure-1", "classes-per-node")(e).verdict == Verdict.FAIL
    weak = figure(tmp_path / "b", {**ALIKE, "dgd": 0.4}, {**ALIKE, "sporadic-sgds": 0.4})
    assert processing_saving(weak, "figure-1", "classes-per-node") == pytest.approx([50 / 9.5])
    assert saves_more_if_heterogeneous("figure-1")(weak).verdict == Verdict.FAIL
    same = figure(tmp_path / "c", ALIKE, ALIKE)
    assert saves_more_if_heterogeneous("figure-1")(same).verdict == Verdict.FAIL


def test_poor_aggregations(tmp_path):
    case = Case("figure-1", "classes-per-node")
    poor = figure(tmp_path / "a", ALIKE, {**ALIKE, "sporadic-aggregations": 0.5})
    assert aggregations_poor(case)(poor).verdict == Verdict.PASS
    good = figure(tmp_path / "b", ALIKE, {**ALIKE, "sporadic-aggregations": 0.9})
    assert aggregations_poor(case)(good).verdict == Verdict.FAIL


def test_delay_panels_end_where_the_first_curve_does(tmp_path):
    """After 100 rounds DSpodFL has spent 30 as printed and 520 raw; DGD 200 and 5100."""
    drawn = draw(PAPER.experiment("figure-1").layout, figure(tmp_path, ALIKE, ALIKE))
    ends = {axes.get_title(loc="left"): axes.get_xlim()[1] for axes in drawn.axes}
    assert len(ends) == 10
    assert ends["(iv) as printed, homogeneous nodes"] == pytest.approx(30)
    assert ends["(iv) homogeneous nodes"] == pytest.approx(520)
    assert ends["(i) homogeneous nodes"] > 100


def test_the_table_has_every_curve_once(tmp_path):
    header, lines = accuracies_at_end("figure-1")(figure(tmp_path, ALIKE, ALIKE))
    assert len(lines) == 2 * (len(METHODS) + len(LINKS_MATTER))
    assert all(len(line) == len(header) for line in lines)
    assert header[-2:] == ["% at 250", "% at 500"]
    assert lines[0] == ["DGD", "homogeneous nodes", "72.0", "100", "100", "5100", "3.5", "7.1"]


# --- Appendix P --------------------------------------------------------------------------------------------


def appendix(folder: Path, ends: dict[str, tuple[float, float]], cost: float = 1) -> Evidence:
    """Every method's final accuracy at the first and the last value of each swept key, after 100 rounds."""
    runs = {}
    for preset, key in (
        (LABELS, "problem.partition.classes"),
        (RADIUS, "network.topology.radius"),
        (BETA, ""),
    ):
        jobs = [
            job(method, 0, rows(end, (cost / 100, cost / 2)), axes={key: value} if key else {})
            for method, both in ends.items()
            for value, end in list(zip((1, 10), both, strict=True))[: None if key else 1]
        ]
        axes = (key,) if key else ()
        runs[preset] = load_record(write_run(folder / preset, jobs, axes=axes, metrics=METRICS))
    return Evidence("full", runs)


def test_leads_and_gain_from_links(tmp_path):
    steady = {m: (0.7, 0.82) if m == "dspodfl" else (0.5, 0.8) for m in METHODS}
    e = appendix(tmp_path / "a", steady)
    assert keeps_its_lead(e).verdict == still_ahead(e).verdict == Verdict.PASS
    assert gains_most(e).verdict == Verdict.FAIL
    eager = {m: (0.2, 0.9) if m == "dspodfl" else (0.5, 0.8) for m in METHODS}
    e = appendix(tmp_path / "b", eager)
    assert keeps_its_lead(e).verdict == still_ahead(e).verdict == Verdict.FAIL  # ahead with ten classes only
    assert gains_most(e).verdict == Verdict.PASS
    header, lines = at_equal_delay(e)
    assert len(header) == len(lines[0]) == 6


def test_as_good_as_the_best_baseline_is_not_ahead(tmp_path):
    equal = appendix(tmp_path / "a", dict.fromkeys(METHODS, (0.7, 0.7)))
    assert still_ahead(equal).verdict == Verdict.FAIL
    above = appendix(tmp_path / "b", dict.fromkeys(METHODS, (0.7, 0.7)) | {"dspodfl": (0.701, 0.7)})
    assert still_ahead(above).verdict == Verdict.PASS


@pytest.mark.parametrize(("cost", "delay", "accuracy"), [(1, 100, 63), (10, 500, 31.5)])
def test_the_delay_of_the_comparison_is_at_most_that_of_the_authors_code(tmp_path, cost, delay, accuracy):
    """100 rounds at a raw 10 each end beyond 500, where half of the accuracy is reached."""
    e = appendix(tmp_path, dict.fromkeys(METHODS, (0.7, 0.7)), cost)
    assert [compared_at(e, preset) for preset in (LABELS, RADIUS, BETA)] == pytest.approx([delay] * 3)
    assert still_ahead(e).ours.endswith(f"DSpodFL {accuracy:.1f} % at a delay of {delay}")
    assert keeps_its_lead(e).ours.endswith(f"at a delay of {delay}")


# --- theory ------------------------------------------------------------------------------------------------


def test_phi_without_sporadic_gradients_and_with_like_nodes_is_triangular():
    """zeta = 0 and d = 1: the error of the average model does not feed the disagreement (Sec. 4.2)."""
    matrix = phi(0.1, mu=1.0, beta=2.0, zeta=0.0, rho=0.5, nodes=10, d_min=1.0, d_max=1.0)
    assert matrix[1, 0] == 0
    assert matrix[0, 0] == pytest.approx(1 - 0.1 * (1 + 0.1 - 0.01))
    assert matrix[0, 1] == pytest.approx(1.1 * 0.1 * 4 / 10)
    assert matrix[1, 1] == pytest.approx(0.75 + 9 * 0.01 * 8)


def test_the_counterexample_breaks_the_proposition_and_a_smaller_step_mends_it():
    found = Evidence("small", {}, proposition())
    assert proposition_suffices(found).verdict == Verdict.FAIL
    c = COUNTEREXAMPLE
    lr = largest_step(c["mu"], c["beta"], c["zeta"], c["rho"], 1.0, 1.0)
    smaller = phi(lr / 4, c["mu"], c["beta"], c["zeta"], c["rho"], NODES, 1.0, 1.0)
    radius = float(np.abs(np.linalg.eigvals(smaller)).max())
    assert radius < 1
    mended = Evidence("small", {}, [{"what": "spectral radius", "value": radius}])
    assert proposition_suffices(mended).verdict == Verdict.PASS


def test_the_gap_shrinks_with_the_step_only_where_d_is_equal_or_corrected():
    found = Evidence("small", {}, gaps())
    verdicts = {
        what: shrinks_with_step(what)(found).verdict
        for what in ("equal d", "unequal d", "unequal d, corrected", "unequal d, from argmin Σ d F")
    }
    assert list(verdicts.values()) == [Verdict.PASS, Verdict.FAIL, Verdict.PASS, Verdict.PASS]


def test_resting_point_is_where_expected_moves_cancel():
    problem, net = Quadratics(), network()
    star, biased = problem.optimum(np.ones(NODES)), problem.optimum(UNEQUAL)
    assert np.linalg.norm(star - biased) > 0.3
    gradient = (UNEQUAL[:, None] * problem.a * (biased - problem.b)).sum(0)
    assert np.abs(gradient).max() < 1e-12
    limit = problem.expected_limit(net, EQUAL, 1e-6)
    assert np.abs(limit - star).max() < 1e-4


def test_draws_of_links(monkeypatch):
    monkeypatch.setattr("holdfast_papers.dspodfl.theory.DRAWS", 500)
    found = {row["what"]: row["value"] for row in links()}
    assert found["E[P^2]"] < 0.05


def test_errata_and_own_statements_are_not_counted():
    claims = PAPER.experiment("theorem-4-1").claims
    assert [claim.kind for claim in claims] == ["paper"] * 3 + ["erratum"] * 2 + ["ours"] * 2
