"""DualFL's experiments: methods that can be built, claims that can fail, and what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paper_checks import build_every_method, failing, verdicts
from sample_run import job, write_run

from holdfast.experiments.record import load_record
from holdfast_papers.base import Claim, Verdict
from holdfast_papers.dualfl import PAPER, theory
from holdfast_papers.dualfl.quadratics import (
    NewtonStep,
    common_path,
    ill_conditioned,
    merely_convex,
    with_l1,
)
from holdfast_papers.evidence import Evidence

RIVALS = ("fedpd", "feddr", "feddyn", "feddualavg", "scaffnew", "apda-inexact", "5gcs")
PASS, FAIL = Verdict.PASS, Verdict.FAIL


def errors(at_start: float, **later: float) -> list[dict[str, float]]:
    """Rows from round 0 on, with the errors of rounds named r1, r5, ..."""
    rows = {0: at_start} | {int(name[1:]): value for name, value in later.items()}
    return [{"round": r, "rel_energy": value} for r, value in rows.items()]


def record(folder: Path, jobs, axes=()):
    return load_record(write_run(folder, jobs, axes=axes, metrics=("rel_energy",)))


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("experiment", [e for e in PAPER.experiments if e.presets], ids=lambda e: e.id)
def test_every_method_of_the_presets_can_be_built(experiment, scale):
    build_every_method(PAPER, experiment, scale)


# --- claims ------------------------------------------------------------------------------------------------


OF_METHODS = [name for name in RIVALS if name != "scaffnew"]
USUAL = {"r1": 0.1, "r5": 5e-3, "r10": 3e-4, "r25": 3e-5, "r50": 2e-6}
DUALFL = {"r1": 0.01, "r5": 1e-3, "r10": 1e-4, "r25": 1e-5, "r50": 1e-6}


def methods(folder: Path, scale: str = "full", dualfl=DUALFL, tuned=None, **rivals) -> Evidence:
    """DualFL with the printed rho and with ``tuned``, and all rivals but Scaffnew."""
    axis = "algorithm.eta"
    momenta = {"0.003": dualfl, "0.001": tuned or dualfl}
    jobs = [job("dualfl", 0, errors(3.5, **rows), axes={axis: rho}) for rho, rows in momenta.items()]
    jobs += [job(name, 0, errors(3.5, **rivals.get(name, USUAL)), axes={axis: ""}) for name in OF_METHODS]
    # a setting that is far worse does not count, nor does one that diverged
    jobs.append(job("fedpd", 0, errors(3.5, **dict.fromkeys(USUAL, 1.0)), axes={axis: "1.0"}))
    jobs.append(job("5gcs", 0, errors(3.5, r1=1e-9), "diverged", axes={axis: "1.0"}))
    return Evidence(scale, {"figure-1-methods": record(folder / "methods", jobs, (axis,))})


def scaffnew(folder: Path, seeds=(USUAL,), dualfl=DUALFL, tuned=None, scale: str = "full") -> Evidence:
    """DualFL with the printed rho and with ``tuned``; one curve of Scaffnew for every seed."""
    rho, momenta = "algorithm.rho", {"0.003": dualfl, "0.001": tuned or dualfl}
    jobs = [job("dualfl", 0, errors(3.5, **rows), axes={rho: value}) for value, rows in momenta.items()]
    others = [job("scaffnew", seed, errors(3.5, **rows)) for seed, rows in enumerate(seeds)]
    runs = {
        "figure-1-rho": record(folder / "rho", jobs, (rho,)),
        "figure-1-scaffnew": record(folder / "scaffnew", others),
    }
    return Evidence(scale, runs)


FIGURE_1 = PAPER.experiment("figure-1-methods")
SCAFFNEW = PAPER.experiment("figure-1-scaffnew")


def test_the_papers_curves_pass_every_claim(tmp_path):
    assert verdicts(FIGURE_1, methods(tmp_path)) == [PASS] * 4
    assert verdicts(SCAFFNEW, scaffnew(tmp_path)) == [PASS] * 5


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"5gcs": USUAL | {"r10": 9e-5}}, [0]),
        ({"5gcs": USUAL | {"r50": 5e-7}}, [1]),
        ({"fedpd": USUAL | {"r25": 2e-5, "r50": 1.5e-5}}, [2]),
        ({"feddr": USUAL | {"r25": 1e-4, "r50": 1e-8}}, [1, 2]),
        ({"feddyn": USUAL | {"r5": 9e-4}}, [0, 3]),
    ],
)
def test_each_claim_about_methods_can_fail(changes, places, tmp_path):
    assert failing(FIGURE_1, methods(tmp_path, **changes)) == places


def test_dualfl_is_tuned_like_its_rivals(tmp_path):
    """The printed rho is above a rival in the end, another one below."""
    ahead = {"5gcs": USUAL | {"r50": 8e-7}}
    assert 1 in failing(FIGURE_1, methods(tmp_path / "printed", **ahead))
    assert 1 not in failing(FIGURE_1, methods(tmp_path / "tuned", tuned=DUALFL | {"r50": 7e-7}, **ahead))


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"seeds": [USUAL | {"r50": 5e-7}]}, [0]),
        ({"seeds": [USUAL | {"r25": 1e-4, "r50": 1e-8}]}, [0, 1]),
        ({"tuned": DUALFL | {"r10": 1e-6, "r25": 9.5e-7, "r50": 9e-7}}, [1, 2]),  # 10 rounds to 1e-6, not 50
        ({"tuned": DUALFL | {"r50": 1e-5}}, [2, 3]),  # never at 1e-6
        ({"dualfl": DUALFL | {"r25": 2e-4}}, [4]),
    ],
)
def test_each_claim_about_scaffnew_and_rho_can_fail(changes, places, tmp_path):
    assert failing(SCAFFNEW, scaffnew(tmp_path, **changes)) == places


def test_scaffnew_is_the_median_of_its_seeds_and_the_verdict_says_how_many(tmp_path):
    """One lucky seed of three does not decide."""
    slow, lucky = USUAL | {"r50": 5e-6}, USUAL | {"r50": 1e-9}
    found = SCAFFNEW.claims[0].check(scaffnew(tmp_path / "one", [slow, slow, lucky]))
    assert (found.verdict, found.sure) == (PASS, "2 of 3 seeds of scaffnew")
    found = SCAFFNEW.claims[0].check(scaffnew(tmp_path / "two", [slow, lucky, lucky]))
    assert (found.verdict, found.sure) == (FAIL, "1 of 3 seeds of scaffnew")


def test_small_scale_looks_at_rounds_1_and_5(tmp_path):
    later = {"5gcs": USUAL | {"r10": 9e-5}}
    assert verdicts(FIGURE_1, methods(tmp_path, "small", **later))[0] == PASS


@pytest.mark.parametrize(
    ("many", "expected"),
    [
        ({"r10": 4e-4, "r30": 4e-5}, [PASS, PASS]),  # 4 times the error, the same rate
        ({"r10": 6e-4, "r30": 6e-5}, [PASS, FAIL]),  # the level is too high
        ({"r10": 1e-4, "r30": 2e-5}, [FAIL, PASS]),  # the rate is slower
    ],
)
@pytest.mark.parametrize("name", ["figure-1-clients", "figure-1-cifar10-clients"])
def test_more_clients(name, many, expected, tmp_path):
    axes = ("problem.nodes",)
    jobs = [
        job("dualfl", 0, errors(3.5, r10=1e-4, r30=1e-5), axes={"problem.nodes": "8"}),
        job("dualfl", 0, errors(3.5, **many), axes={"problem.nodes": "64"}),
    ]
    evidence = Evidence("full", {name: record(tmp_path / "run", jobs, axes)})
    assert verdicts(PAPER.experiment(name), evidence) == expected


@pytest.mark.parametrize(
    ("printed", "scaled", "expected"),
    [(3.4, 0.1, [FAIL, PASS, PASS]), (0.1, 0.1, [PASS, PASS, PASS]), (3.4, 3.0, [FAIL, PASS, FAIL])],
)
def test_table_2(printed, scaled, expected, tmp_path):
    runs = {}
    for preset, left in (("table-2-printed", printed), ("table-2-times-7500", scaled)):
        jobs = [job(name, 0, errors(3.5, r20=left)) for name in RIVALS]
        runs[preset] = record(tmp_path / preset, [*jobs, job("dualfl", 0, errors(3.5, r20=1e-4))])
    experiment = PAPER.experiment("table-2")
    evidence = Evidence("full", runs)
    assert verdicts(experiment, evidence) == expected
    assert experiment.table(evidence)[1][0] == ["DualFL", "2.86e-05", "2.86e-05"]


@pytest.mark.parametrize("rival", ["fedpd", "feddyn", "5gcs", "feddualavg", "scaffnew"])
def test_table_2_asks_the_same_of_every_rival(rival, tmp_path):
    """One that does not work with scaled steps, or only with printed ones, is enough to fail."""
    dualfl = job("dualfl", 0, errors(3.5, r20=1e-4))
    printed = [job(name, 0, errors(3.5, r20=1.0)) for name in RIVALS]
    scaled = {name: errors(3.5, r20=0.4 if name == rival else 0.1) for name in RIVALS}
    blown = [job(n, 0, rows, "diverged" if n == rival else "done") for n, rows in scaled.items()]
    check = PAPER.experiment("table-2").claims[2].check
    runs = {"table-2-printed": record(tmp_path / "printed", [*printed, dualfl])}
    for place, jobs in enumerate([[job(n, 0, rows) for n, rows in scaled.items()], blown]):
        runs["table-2-times-7500"] = record(tmp_path / f"scaled-{place}", [*jobs, dualfl])
        assert check(Evidence("full", runs)).verdict == FAIL
        assert check(Evidence("small", runs)).verdict == Verdict.NOT_COMPARABLE


def test_other_momenta_on_cifar10_are_reported_only(tmp_path):
    """Ten rounds cannot tell, whatever they show."""
    jobs = [
        job("dualfl", 0, errors(3.5, r10=last), axes={"algorithm.rho": rho})
        for rho, last in (("0.0", 1e-3), ("0.01", 1.0))
    ]
    runs = {"figure-1-cifar10-rho": record(tmp_path / "run", jobs, ("algorithm.rho",))}
    found = PAPER.experiment("figure-1-cifar10-rho").claims[0].check(Evidence("full", runs))
    assert found.verdict == Verdict.NOT_COMPARABLE
    assert found.ours == "last errors rho 0.0: 1.00e-03, rho 0.01: 1.00e+00"


@pytest.mark.parametrize(("rival", "expected"), [(2e-3, PASS), (1e-4, FAIL)])
def test_cifar10(rival, expected, tmp_path):
    later = {"r1": 0.1, "r5": 5e-3, "r10": rival}
    jobs = [
        job("dualfl", 0, errors(3.5, r1=0.05, r5=2e-3, r10=1e-3)),
        job("scaffnew", 0, errors(3.5, **later)),
    ]
    runs = {"figure-1-cifar10": record(tmp_path / "run", jobs)}
    assert PAPER.experiment("figure-1-cifar10").claims[0].check(Evidence("full", runs)).verdict == expected


# --- computations ------------------------------------------------------------------------------------------


def test_the_quadratics_are_what_they_say():
    curvatures = {kappa: eigenvalues(ill_conditioned(kappa)) for kappa in (10.0, 1000.0)}
    for kappa, values in curvatures.items():
        assert values.min() == pytest.approx(1 / kappa)
        assert values.max() == pytest.approx(1)
    assert eigenvalues(merely_convex()).min() == pytest.approx(0, abs=1e-12)
    problem, optimum = with_l1(1.5)
    assert 0 < (optimum == 0).sum() < len(optimum)
    # at the optimum the smooth part's slope balances the l1 term where there is no kink
    moving = optimum != 0
    assert problem.common_gradient(optimum)[moving].abs().max() < 1e-12


def eigenvalues(problem):
    return torch.linalg.eigvalsh(problem.A)


def test_one_newton_step_is_exact():
    problem = ill_conditioned(1000.0)
    alone = common_path(theory.DualFL(nu=1e-3, solver=NewtonStep()), problem, 1)[1]
    own = problem.b.mean(0)  # every node's own minimiser, averaged
    assert torch.allclose(alone, own, atol=1e-9)


def test_the_theorems_hold_on_small_problems():
    rows = [*theory.strongly_convex((10.0, 30.0)), *theory.convex((0.1, 0.03)), *theory.nonsmooth(100)]
    for claim in (theory.TABLE_1.claims[1], *theory.THEOREMS.claims):
        assert claim.check(Evidence("small", {}, rows)).verdict == PASS, claim.says


@pytest.mark.parametrize(
    ("claim", "column", "factor"),
    [
        (theory.TABLE_1.claims[0], "rounds", lambda row: row.get("kappa", 1)),
        (theory.TABLE_1.claims[2], "rounds", lambda row: row.get("alpha", 1)),
        (theory.TABLE_1.claims[1], "error_times_n", lambda row: 3),
        (theory.TABLE_1.claims[1], "left", lambda row: 30 if row["regime"] == theory.KINKS else 1),
        (theory.THEOREMS.claims[0], "factor", lambda row: 1.2),
        (theory.THEOREMS.claims[1], "gradient", lambda row: 1.01),
    ],
)
def test_every_theorem_can_fail(claim: Claim, column: str, factor):
    rows = [
        {"regime": theory.SMOOTH, "kappa": k, "rounds": 5 * k**0.5, "factor": 0.9, "bound": 0.95}
        for k in (10, 100)
    ]
    rows += [{"regime": theory.DESCENT, "kappa": k, "rounds": 5 * k} for k in (10, 100)]
    rows += [
        {"regime": theory.CONVEX, "alpha": a, "rounds": 5 * a**-0.5, "gradient": a, "floor": a}
        for a in (0.1, 0.01)
    ]
    rows += [  # a thousandth is left after 32 rounds, and after 64 without momentum
        {"regime": regime, "round": n, "error_times_n": 1.0, "left": 2.0 ** (-n / slower)}
        for regime, slower in ((theory.KINKS, 3.2), (theory.NO_MOMENTUM, 6.4))
        for n in range(1, 101)
    ]
    assert claim.check(Evidence("small", {}, rows)).verdict == PASS
    for row in rows:
        if column in row:
            row[column] *= factor(row)
    assert claim.check(Evidence("small", {}, rows)).verdict == FAIL
