"""DSpodFL's experiments: presets in both readings, claims that can fail, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_checks import planned
from sample_run import job, write_run

from holdfast.papers.base import Circumstances, Verdict
from holdfast.papers.drawing import draw
from holdfast.papers.dspodfl import PAPER
from holdfast.papers.dspodfl.appendix import (
    BETA,
    LABELS,
    RADIUS,
    at_equal_delay,
    gains_most,
    most_robust,
    still_ahead,
)
from holdfast.papers.dspodfl.figures import (
    LINKS_MATTER,
    METHODS,
    Case,
    accuracies_at_end,
    aggregations_poor,
    ahead_at_equal_delay,
    best_per_iteration,
    delay_saved,
    saves,
    saves_more_unlike,
)
from holdfast.papers.dspodfl.theory import (
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
from holdfast.papers.evidence import Evidence
from holdfast.papers.execution import Task
from holdfast.runs.record import load_record

METRICS = ("test_accuracy", "tau_proc", "tau_trans", "tau_total")
COSTS = {"dgd": (1, 1), "sporadic-aggregations": (1, 0.2), "sporadic-sgds": (0.1, 1), "dspodfl": (0.1, 0.2)}


def rows(end: float, cost: tuple[float, float], rounds: int = 100) -> list[dict]:
    """Accuracy rises on a straight line from 0 to ``end``; a round costs (processing, transmission)."""
    return [
        {
            "round": r,
            "test_accuracy": end * r / rounds,
            "tau_proc": cost[0] * r,
            "tau_trans": cost[1] * r,
            "tau_total": sum(cost) * r,
        }
        for r in range(0, rounds + 1, 5)
    ]


def figure(folder: Path, iid: dict[str, float], unlike: dict[str, float]) -> Evidence:
    """Final accuracies after 100 rounds; the same in both readings but that latched links cost 1 each."""
    runs = {}
    for name, methods in (("figure-1", tuple(METHODS)), ("figure-1-latched", LINKS_MATTER)):
        jobs = [
            job(
                method,
                0,
                rows(ends[method], (COSTS[method][0], 1) if "latched" in name else COSTS[method]),
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
            assert one.experiment.network.latched_links == preset.file.endswith("-latched")
            assert one.experiment.problem.nodes == 10
            if scale == "full":
                assert one.experiment.algorithm.parameters["lr"] == 0.01
                assert one.experiment.problem.batch_size == 16


def test_figures_come_in_both_readings_and_differ_in_nothing_else(tmp_path):
    for id in ("figure-1", "figure-2"):
        experiment = PAPER.experiment(id)
        printed, released = (
            Task(PAPER, experiment, preset, Circumstances("full", "cpu", None), tmp_path)
            for preset in experiment.presets
        )
        kept = {a["label"] if "label" in a else a["name"]: a for a in printed.raw["algorithm"]}
        assert set(kept) == set(METHODS)
        assert released.raw["algorithm"] == [kept[method] for method in LINKS_MATTER]
        assert released.raw["network"] == {**printed.raw["network"], "latched_links": True}
        assert released.raw["problem"] == printed.raw["problem"]


# --- Figs. 1 and 2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dspodfl", "latched", "verdict"),
    [(0.8, False, Verdict.PASS), (0.8, True, Verdict.PASS), (0.05, False, Verdict.FAIL)],
)
def test_ahead_at_equal_total_delay(tmp_path, dspodfl, latched, verdict):
    """A round of DSpodFL costs 0.3 where DGD's costs 2: with the same curve per round it is ahead."""
    e = figure(tmp_path, {**ALIKE, "dspodfl": dspodfl}, ALIKE)
    check = ahead_at_equal_delay(Case("figure-1", "iid", "-latched" if latched else ""), most=1)
    assert check(e).verdict == verdict


def test_latched_links_cost_what_makes_dspodfl_cheap(tmp_path):
    """With latched links a round costs 1.1 instead of 0.3: if it learns less per round, it falls behind."""
    e = figure(tmp_path, {**ALIKE, "dspodfl": 0.3}, ALIKE)
    assert ahead_at_equal_delay(Case("figure-1", "iid", ""), most=1)(e).verdict == Verdict.PASS
    assert ahead_at_equal_delay(Case("figure-1", "iid", "-latched"), most=1)(e).verdict == Verdict.FAIL


def test_best_per_iteration(tmp_path):
    e = figure(tmp_path, {**ALIKE, "dgd": 0.85}, ALIKE)
    rivals = [method for method in METHODS if method != "dgd"]
    assert best_per_iteration(Case("figure-1", "iid", ""), "dgd", rivals)(e).verdict == Verdict.PASS
    assert (
        best_per_iteration(Case("figure-1", "classes-per-node", ""), "dgd", rivals)(e).verdict == Verdict.FAIL
    )


def test_delay_until_the_same_accuracy(tmp_path):
    """Both reach 95 % of 0.8 at round 95; DGD has spent 95 on computing, sporadic SGDs 9.5."""
    e = figure(tmp_path, ALIKE, {**ALIKE, "dgd": 0.4})
    like = Case("figure-1", "iid", "")
    assert delay_saved(e, like, "sporadic-sgds", "tau_proc") == pytest.approx([10])
    assert delay_saved(e, like, "sporadic-aggregations", "tau_trans") == pytest.approx([5])
    assert saves(like, "sporadic-aggregations", "tau_trans")(e).verdict == Verdict.PASS
    latched = Case("figure-1", "iid", "-latched")
    assert saves(latched, "sporadic-aggregations", "tau_trans")(e).verdict == Verdict.FAIL  # as much as DGD
    assert saves_more_unlike("figure-1")(e).verdict == Verdict.PASS
    slow = figure(tmp_path / "b", {**ALIKE, "dgd": 0.4}, ALIKE)
    assert saves_more_unlike("figure-1")(slow).verdict == Verdict.FAIL


def test_poor_aggregations(tmp_path):
    case = Case("figure-1", "classes-per-node", "")
    poor = figure(tmp_path / "a", ALIKE, {**ALIKE, "sporadic-aggregations": 0.5})
    assert aggregations_poor(case)(poor).verdict == Verdict.PASS
    good = figure(tmp_path / "b", ALIKE, {**ALIKE, "sporadic-aggregations": 0.9})
    assert aggregations_poor(case)(good).verdict == Verdict.FAIL


def test_delay_panels_end_where_the_first_curve_does(tmp_path):
    """After 100 rounds DSpodFL has spent 30, and with latched links 110; DGD 200."""
    drawn = draw(PAPER.experiment("figure-1").layout, figure(tmp_path, ALIKE, ALIKE))
    ends = {axes.get_title(loc="left"): axes.get_xlim()[1] for axes in drawn.axes}
    assert len(ends) == 16
    assert ends["(iv) like nodes, links drawn afresh"] == pytest.approx(30)
    assert ends["(iv) like nodes, latched links"] == pytest.approx(110)
    assert ends["(i) like nodes, latched links"] > 100


def test_the_table_has_every_curve_once(tmp_path):
    header, lines = accuracies_at_end("figure-1")(figure(tmp_path, ALIKE, ALIKE))
    assert len(lines) == 2 * (len(METHODS) + len(LINKS_MATTER))
    assert all(len(line) == len(header) for line in lines)
    assert lines[0] == ["DGD", "like nodes", "80.0", "100", "100"]


# --- Appendix P --------------------------------------------------------------------------------------------


def appendix(folder: Path, ends: dict[str, tuple[float, float]]) -> Evidence:
    """Every method's final accuracy at the first and the last value of each swept key; all rounds cost 1."""
    runs = {}
    for preset, key in (
        (LABELS, "problem.partition.classes"),
        (RADIUS, "network.topology.radius"),
        (BETA, ""),
    ):
        jobs = [
            job(method, 0, rows(end, (0.5, 0.5)), axes={key: value} if key else {})
            for method, both in ends.items()
            for value, end in list(zip((1, 10), both, strict=True))[: None if key else 1]
        ]
        axes = (key,) if key else ()
        runs[preset] = load_record(write_run(folder / preset, jobs, axes=axes, metrics=METRICS))
    return Evidence("full", runs)


def test_robustness_and_gain_from_links(tmp_path):
    steady = {m: (0.7, 0.72) if m == "dspodfl" else (0.5, 0.8) for m in METHODS}
    e = appendix(tmp_path / "a", steady)
    assert most_robust(e).verdict == still_ahead(e).verdict == Verdict.PASS
    assert gains_most(e).verdict == Verdict.FAIL
    eager = {m: (0.2, 0.9) if m == "dspodfl" else (0.5, 0.8) for m in METHODS}
    e = appendix(tmp_path / "b", eager)
    assert most_robust(e).verdict == still_ahead(e).verdict == Verdict.FAIL
    assert gains_most(e).verdict == Verdict.PASS
    header, lines = at_equal_delay(e)
    assert len(header) == len(lines[0]) == 6


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
    monkeypatch.setattr("holdfast.papers.dspodfl.theory.DRAWS", 500)
    found = {row["what"]: row["value"] for row in links()}
    assert found["rows and columns of P"] < 1e-12
    assert found["E[P^2]"] < 0.05
    assert 0 < found["rho"] < 1
