"""FedPD's experiments: methods that can be built, claims that can fail, and what is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paper_checks import build_every_method, failing, verdicts
from sample_run import job, write_run

from holdfast.experiments.record import load_record
from holdfast_papers.base import Circumstances, Verdict
from holdfast_papers.evidence import Evidence
from holdfast_papers.fedpd import PAPER, figure_1, figure_2
from holdfast_papers.fedpd.femnist import lead_at_equal_communication

PASS, FAIL = Verdict.PASS, Verdict.FAIL


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("experiment", [e for e in PAPER.experiments if e.presets], ids=lambda e: e.id)
def test_every_method_of_the_presets_can_be_built(experiment, scale):
    build_every_method(PAPER, experiment, scale)


# --- Fig. 1 ------------------------------------------------------------------------------------------------


def test_the_bound_and_where_table_3_is_right():
    """Table III's laws hold for p near 0 and near 1 only; that is what the claims say."""
    rows = figure_1.curves(Circumstances("small", "cpu", None))
    assert failing(figure_1.FIGURE_1, Evidence("small", {}, rows)) == [2, 4]
    assert abs(figure_1.TURN - 0.5985) < 1e-4
    assert figure_1.c_3(figure_1.TURN) == pytest.approx(1)
    # by hand for p = 0.5: C_3 = 0.865487, and 1 - C_3^2 = 0.250932
    near = 0.5 * (0.250932 * 0.5 * 1.15451 * 1.88627 / 0.11373) ** 2
    assert figure_1.bound(0.5) == pytest.approx(near, rel=1e-3)


@pytest.mark.parametrize(
    ("power", "expected"),
    [(2.0, [PASS, PASS, PASS, FAIL, FAIL]), (1.0, [PASS, FAIL, FAIL, FAIL, FAIL])],
)
def test_the_square_law_can_hold_and_fail(power, expected):
    rows = [
        {"curve": figure_1.BOUND, "p": p, "c": p**power, "c_3": figure_1.c_3(p)}
        for p in np.linspace(0.001, 0.95, 400)
    ]
    rows.append({"curve": figure_1.BEYOND, "p": 0.995, "c": 1e6, "c_3": figure_1.c_3(0.995)})
    assert verdicts(figure_1.FIGURE_1, Evidence("small", {}, rows)) == expected


@pytest.mark.parametrize(("drift", "expected"), [(1.9, PASS), (2.1, FAIL)])
def test_the_logarithmic_law_can_hold_and_fail(drift, expected):
    """C_3 to the power 2/(1 - p) from the turn on, but for a factor that grows to ``drift``."""
    rows = [
        {
            "curve": figure_1.BOUND,
            "p": p,
            "c": figure_1.c_3(p) ** (2 / (1 - p)) * np.interp(p, [figure_1.TURN, 0.95], [1, drift]),
            "c_3": figure_1.c_3(p),
        }
        for p in np.linspace(0.001, 0.95, 400)
    ]
    far = figure_1.c_3(0.995) ** (2 / 0.005)
    rows.append({"curve": figure_1.BEYOND, "p": 0.995, "c": far, "c_3": figure_1.c_3(0.995)})
    assert verdicts(figure_1.FIGURE_1, Evidence("small", {}, rows))[3:] == [PASS, expected]


@pytest.mark.parametrize(("factor", "expected"), [(1.0, PASS), (1.001, FAIL), (1.1, FAIL), (9.0, FAIL)])
def test_another_turn_fails(factor, expected):
    """1.001 moves it by 0.0007; 9 is above 1 everywhere."""
    rows = figure_1.curves(Circumstances("small", "cpu", None))
    for row in rows:
        row["c_3"] *= factor
    assert figure_1.turn(Evidence("small", {}, rows)).verdict == expected


def test_a_second_turn_fails():
    rows = figure_1.curves(Circumstances("small", "cpu", None))
    for row in rows:
        if row["p"] > 0.9:
            row["c_3"] = 0.9
    found = figure_1.turn(Evidence("small", {}, rows))
    assert found.verdict == FAIL
    assert found.ours.startswith("C_3 crosses 1 at p = 0.5985, 0.")


# --- Fig. 2 and Table I ------------------------------------------------------------------------------------

LAST = {  # label: the paper's gap at the end, or near it
    "fedpd-gd": 1e-20,
    "fedpd-gd-half": 1e-9,
    "fedpd-gd-falling": 1e-11,
    "fedpd-vr": 1e-14,
    "fedprox-vr": 5e-9,
    "fedpd-sgd": 1e-6,
    "fedavg-sgd": 1e-3,
    "fedavg-gd": 1e-10,
}


STALLING = ("fedavg-gd", "fedpd-gd-half", "fedprox-vr")


def gaps(last: float, flat: bool, rounds: int = 600) -> list[dict[str, float]]:
    """From 1e-2 down to ``last``: evenly on the log scale, or there from the middle on."""
    reached = rounds // 2 if flat else rounds
    return [
        {"round": r, "grad_norm2": 10 ** np.interp(r, [0, reached], [-2, np.log10(last)])}
        for r in range(0, rounds + 1, 10)
    ]


def figure_2_evidence(
    folder: Path, scale: str = "full", flat=STALLING, falling=(), weak=None, strong=None
) -> Evidence:
    """Methods ``flat`` stall, but for those (case, method) in ``falling``."""
    axis = "problem.dataset.heterogeneity"
    runs: dict[str, list] = {}
    for case, changes in (("weak", {"fedprox-vr": 1e-20} | (weak or {})), ("strong", strong or {})):
        for label, last in (LAST | changes).items():
            # gossip's payload is half of the others' in made-up runs
            name = figure_2.PRESETS.get(label, figure_2.STEPS)
            stalls = label in flat and (case, label) not in falling
            runs.setdefault(name, []).append(job(label, 0, gaps(last, stalls), axes={axis: case}))
    records = {}
    for name, jobs in runs.items():
        path = write_run(folder / name, jobs, axes=(axis,), metrics=("grad_norm2",))
        text = (path / "metrics.csv").read_text().splitlines()
        (path / "metrics.csv").write_text("\n".join([text[0], *map(halved, text[1:])]) + "\n")
        records[name] = load_record(path)
    return Evidence(scale, records)


def halved(line: str) -> str:
    """Half of the payload for the method that skips half of the communication."""
    cells = line.split(",")
    if cells[0] == "fedpd-gd-half":
        cells[5] = str(float(cells[5]) / 2)
    return ",".join(cells)


def test_the_papers_gaps_pass_every_claim(tmp_path):
    assert failing(figure_2.FIGURE_2, figure_2_evidence(tmp_path)) == []


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"strong": {"fedpd-gd": 1e-17}}, [0]),
        ({"flat": (*STALLING, "fedpd-gd")}, [0]),
        ({"weak": {"fedavg-gd": 1e-12}}, [1]),
        ({"falling": [("weak", "fedavg-gd")]}, [1]),
        ({"falling": [("strong", "fedavg-gd")]}, [1]),
        ({"strong": {"fedpd-vr": 1e-11}}, [2]),
        ({"weak": {"fedpd-gd-half": 1e-12}}, [3]),
        ({"falling": [("weak", "fedpd-gd-half")]}, [3]),
        ({"falling": [("strong", "fedpd-gd-half")]}, [3]),
        ({"strong": {"fedpd-gd-falling": 1e-8}}, [4]),
        ({"weak": {"fedprox-vr": 1e-9}}, [5]),
        ({"strong": {"fedprox-vr": 1e-11}}, [6]),
        ({"falling": [("strong", "fedprox-vr")]}, [6]),
        ({"falling": [("weak", "fedprox-vr")]}, []),  # there it need not stall
        ({"flat": ()}, [1, 3, 6]),
        ({"strong": {"fedavg-sgd": 1e-7}}, [7]),
        ({"strong": {"fedpd-sgd": 2e-4}}, [7]),
    ],
)
def test_each_claim_of_figure_2_can_fail(changes, places, tmp_path):
    assert failing(figure_2.FIGURE_2, figure_2_evidence(tmp_path, **changes)) == places


def test_small_scale_asks_for_signs(tmp_path):
    higher = {
        "fedpd-gd": 1e-10,
        "fedpd-vr": 1e-10,
        "fedprox-vr": 2e-10,
        "fedpd-gd-half": 2e-10,
        "fedavg-gd": 1e-9,
    }
    strong = higher | {"fedpd-gd-falling": 1e-10}
    evidence = figure_2_evidence(tmp_path, "small", flat=(), weak=higher, strong=strong)
    expected = [PASS] * 8
    expected[1] = Verdict.NOT_COMPARABLE  # FedAvg's gap still falls
    assert verdicts(figure_2.FIGURE_2, evidence) == expected


@pytest.mark.parametrize(
    ("strong", "places"),
    [
        ({"fedpd-gd": 1e-8}, [0, 3, 6]),
        ({"fedpd-vr": 2e-9}, [2]),
        ({"fedpd-gd-half": 1e-21}, [3, 4]),
        ({"fedprox-vr": 1e-21}, [6]),
        ({"fedavg-sgd": 1e-7}, [7]),
    ],
)
def test_the_signs_at_small_scale_can_fail(strong, places, tmp_path):
    evidence = figure_2_evidence(tmp_path, "small", strong={"fedavg-gd": 1e-9} | strong)
    assert failing(figure_2.FIGURE_2, evidence) == places


@pytest.mark.parametrize(("last", "expected"), [(1e-9, PASS), (5e-3, FAIL)])
def test_table_1(last, expected, tmp_path):
    axis = "problem.dataset.heterogeneity"
    jobs = [job("fedpd", 0, gaps(last, False), axes={axis: case}) for case in ("weak", "strong")]
    path = write_run(tmp_path / "run", jobs, axes=(axis,), metrics=("grad_norm2",))
    evidence = Evidence("full", {"table-1": load_record(path)})
    assert verdicts(figure_2.TABLE_1, evidence) == [expected]


# --- FEMNIST -----------------------------------------------------------------------------------------------


def curve(*accuracies: float, every: int = 10) -> list[dict[str, float]]:
    return [{"round": every * i, "average_accuracy": value} for i, value in enumerate(accuracies)]


def femnist(folder: Path, **runs: list) -> Evidence:
    """Made-up runs read 3,200 samples and send 1 MiB a round, gossip half of it."""
    records = {
        name.replace("_", "-"): load_record(write_run(folder / name, jobs, metrics=("average_accuracy",)))
        for name, jobs in runs.items()
    }
    return Evidence("full", records)


@pytest.mark.parametrize(
    ("fast", "middle", "slow", "expected"),
    [(1, 2, 3, PASS), (1, 2, 2, FAIL), (2, 1, 6, FAIL), (1, 3, 2, FAIL), (9, 2, 3, FAIL)],
)
def test_samples_to_an_accuracy(fast, middle, slow, expected, tmp_path):
    """Each reaches 0.5 at its place; 9 is never."""

    def reaching(place):
        return curve(*(0.6 if i >= place else 0.1 for i in range(8)))

    evidence = femnist(
        tmp_path,
        figure_3_samples=[job("fedpd-vr", 0, reaching(fast))],
        figure_3_sarah=[job("fedprox-sarah", 0, reaching(middle))],
        figure_3_full_batch=[job("fedavg-gd", 0, reaching(slow))],
    )
    assert PAPER.experiment("figure-3").claims[0].check(evidence).verdict == expected


@pytest.mark.parametrize(("always", "expected"), [(0.4, PASS), (0.6, FAIL)])
def test_skipping_at_equal_communication(always, expected, tmp_path):
    """The one that skips ends after 10 rounds' payload, where the other has reached ``always``."""
    jobs = [job("fedpd-sgd", 0, curve(0.1, always, 0.9)), job("fedpd-sgd-half", 0, curve(0.1, 0.5))]
    evidence = femnist(tmp_path, figure_3_skipping=jobs)
    assert PAPER.experiment("figure-3").claims[1].check(evidence).verdict == expected


@pytest.mark.parametrize(("half", "expected"), [(0.41, PASS), (0.39, FAIL)])
def test_equal_communication_between_two_evaluations(half, expected, tmp_path):
    """The one that skips ends after 5 rounds' payload, halfway between 0.1 and 0.7 of the other."""
    jobs = [
        job("fedpd-sgd", 0, curve(0.1, 0.7, 0.9)),
        job("fedpd-sgd-half", 0, curve(0.1, half, every=5)),
    ]
    evidence = femnist(tmp_path, figure_3_skipping=jobs)
    assert PAPER.experiment("figure-3").claims[1].check(evidence).verdict == expected


def test_seeds_are_compared_at_their_own_communication(tmp_path):
    """Of those that skip, one ends after 5 rounds' payload and one after 10: 0.5 over 0.4, and over 0.7."""
    always = [job("fedpd-sgd", seed, curve(0.1, 0.7, 0.9)) for seed in (0, 1)]
    skipping = [job("fedpd-sgd-half", seed, curve(0.1, 0.5, every=5 * (seed + 1))) for seed in (0, 1)]
    evidence = femnist(tmp_path, figure_3_skipping=[*always, *skipping])
    curves = (evidence.curve(label) for label in ("fedpd-sgd-half", "fedpd-sgd"))
    np.testing.assert_allclose(lead_at_equal_communication(*curves), [10, -20])


FIGURE_4 = {
    "fedavg": (0.1, 0.7, 0.80),
    "fedprox": (0.1, 0.8, 0.86),
    "fedpd": (0.1, 0.75, 0.86),
    "fedpd-half": (0.1, 0.85),
    "fedpd-quarter": (0.1, 0.84),
}
ROUNDS_APART = {"fedpd-quarter": 5}  # it ends with half of the payload of fedpd-half; all others 10


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({}, []),
        ({"fedavg": (0.1, 0.7, 0.861)}, [0]),
        ({"fedprox": (0.1, 0.8, 0.87)}, [1]),
        ({"fedpd-half": (0.1, 0.74)}, [2, 3]),
        ({"fedpd-quarter": (0.1, 0.82)}, [3]),
        ({"fedpd-quarter": (0.1, 0.47)}, [2, 3]),  # half has 0.475 there, all rounds 0.425
    ],
)
def test_figure_4(changes, places, tmp_path):
    jobs = [
        job(label, 0, curve(*values, every=ROUNDS_APART.get(label, 10)))
        for label, values in (FIGURE_4 | changes).items()
    ]
    evidence = femnist(tmp_path, figure_4=jobs)
    experiment = PAPER.experiment("figure-4")
    assert failing(experiment, evidence) == places
    assert verdicts(experiment, evidence)[4] == Verdict.NOT_COMPARABLE
