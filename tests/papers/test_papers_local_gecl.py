"""The claims of Local G-ECL on figures that are made up: the paper's own hold, others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_checks import failing, verdicts
from sample_run import accuracies, job, write_run

from holdfast.experiments.record import load_record
from holdfast_papers.base import Verdict
from holdfast_papers.evidence import Evidence
from holdfast_papers.local_gecl import table_4
from holdfast_papers.local_gecl.curves import FIGURE_3
from holdfast_papers.local_gecl.figure_1 import RING, flat_in_h, flat_in_k
from holdfast_papers.local_gecl.table_3 import TABLE_3, TABLE_3_STEPS, as_printed

STEPS = ["0.2", "0.05", "0.0125", "0.003125", "0.00078125", "0.000195"]
PRINTED = {
    "local-gecl": [73.44, 76.65, 80.24, 83.20, 83.95, 76.58],
    "d-scaffold": [73.30, 76.75, 79.58, 83.25, 83.95, 76.58],
    "gossip": [66.37, 70.83, 73.65, 74.0, 75.95, 71.72],
}


def table_3(folder: Path, scale: str = "full", **changes: list[float]) -> Evidence:
    """Table III with lines changed; three seeds around each value, the best in mid-run."""
    table = PRINTED | {name.replace("_", "-"): line for name, line in changes.items()}
    jobs = [
        job(name, seed, accuracies(0.1, (best + seed - 1) / 100, 0.5), axes={"algorithm.lr": lr})
        for name, line in table.items()
        for lr, best in zip(STEPS, line, strict=True)
        for seed in range(3)
    ]
    record = load_record(write_run(folder / "run", jobs, axes=("algorithm.lr",)))
    evidence = Evidence(scale, {"table-3": record})
    assert as_printed(evidence)[1][0][1] == f"{table['local-gecl'][0]:.2f} ± 1.00"
    return evidence


def changed(name: str, step: str, by: float) -> list[float]:
    return [value + by * (lr == step) for lr, value in zip(STEPS, PRINTED[name], strict=True)]


def test_the_printed_table_passes_every_claim(tmp_path: Path) -> None:
    assert verdicts(TABLE_3, table_3(tmp_path)) == [Verdict.PASS] * 3


@pytest.mark.parametrize(
    ("line", "step", "by", "places"),
    [
        ("d-scaffold", "0.2", 1.2, [0]),  # a column further apart than a point
        ("gossip", "0.00078125", 2.1, [1]),  # less than six points below
        ("gossip", "0.003125", 9.0, []),  # Gossip's level is not checked, only its distance
    ],
)
def test_each_claim_fails_alone(line: str, step: str, by: float, places: list[int], tmp_path: Path) -> None:
    assert failing(TABLE_3, table_3(tmp_path, **{line: changed(line, step, by)})) == places


def test_a_level_more_than_three_points_off_fails(tmp_path: Path) -> None:
    both = {name: [value - 3.1 for value in PRINTED[name]] for name in ("local-gecl", "d-scaffold")}
    gossip = [value - 3.1 for value in PRINTED["gossip"]]
    evidence = table_3(tmp_path, **both, gossip=gossip)
    assert verdicts(TABLE_3, evidence) == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    lines = as_printed(evidence)[1]
    assert lines[1] == ["printed", "73.44", "76.65", "80.24", "83.20", "83.95", "76.58"]
    assert lines[2] == ["ours − printed"] + ["-3.10"] * 6


@pytest.mark.parametrize(("below", "verdict"), [(1.1, Verdict.PASS), (0.3, Verdict.FAIL)])
def test_small_scale_asks_for_a_point(below: float, verdict: Verdict, tmp_path: Path) -> None:
    """A method without its correction is that near to Gossip by chance."""
    near = [value - below for value in PRINTED["local-gecl"]]
    found = verdicts(TABLE_3, table_3(tmp_path, "small", gossip=near))
    assert found == [Verdict.PASS, verdict, Verdict.NOT_COMPARABLE]


@pytest.mark.parametrize(
    ("scale", "larger", "verdict"),
    [
        ("full", [0.80, 0.83, 0.84], Verdict.PASS),  # 0.67 points above, with a deviation of 2.1
        ("full", [0.82, 0.825, 0.83], Verdict.FAIL),  # 0.83 points above, with a deviation of 0.3
        ("full", [0.70, 0.70, 0.70], Verdict.PASS),  # the paper's own step is the best
        ("small", [0.90, 0.90, 0.90], Verdict.NOT_COMPARABLE),
    ],
)
def test_the_best_step_is_judged_by_the_spread_over_partitions(scale, larger, verdict, tmp_path) -> None:
    smaller = [0.81, 0.82, 0.82]
    jobs = [
        job(name, seed, accuracies(0.1, best, 0.5), axes={"algorithm.lr": lr})
        for name in ("local-gecl", "d-scaffold")
        for lr, line in (("0.003125", larger), ("0.00078125", smaller))
        for seed, best in enumerate(line)
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("algorithm.lr",)))
    assert verdicts(TABLE_3_STEPS, Evidence(scale, {"table-3-steps": record})) == [verdict]


@pytest.mark.parametrize(
    ("early", "late", "expected"),
    [
        (0.80, 0.82, [Verdict.PASS, Verdict.PASS]),
        (0.60, 0.82, [Verdict.PASS, Verdict.FAIL]),  # apart before round 100 only
        (0.60, 0.79, [Verdict.FAIL, Verdict.FAIL]),
    ],
)
def test_curves_overlap_literally_and_from_round_100_on(early, late, expected, tmp_path: Path) -> None:
    rows = {"0.1": (early, late, 0.83), "inf": (0.81, 0.83, 0.83)}
    jobs = [
        job(
            name,
            0,
            [{"round": r, "test_accuracy": v} for r, v in zip((0, 50, 100, 200), (0.1, *ends), strict=True)],
            axes={"problem.partition.h": h},
        )
        for name in ("local-gecl", "d-scaffold", "gossip")
        for h, ends in rows.items()
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    assert verdicts(FIGURE_3, Evidence("full", {"figure-3": record}))[:2] == expected


@pytest.mark.parametrize(("last", "verdict"), [(0.83, Verdict.PASS), (0.85, Verdict.FAIL)])
def test_more_than_64_local_steps(last, verdict, tmp_path: Path) -> None:
    jobs = [
        job("local-gecl", 0, accuracies(0.1, end), axes={"algorithm.local_steps": k})
        for k, end in (("1", 0.3), ("64", 0.82), ("128", 0.825), ("256", last))
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("algorithm.local_steps",)))
    assert flat_in_k(Evidence("full", {RING.by_k: record}), RING).verdict == verdict
    assert flat_in_k(Evidence("small", {RING.by_k: record}), RING).verdict == Verdict.NOT_COMPARABLE


@pytest.mark.parametrize(("more", "verdict"), [(0, Verdict.PASS), (400, Verdict.FAIL)])
def test_equal_work_is_counted(more, verdict) -> None:
    rows = [
        {"algorithm": name, "gradients": 51_200 + more * (name == "d-scaffold")} for name in table_4.PRINTED
    ]
    assert table_4.equal_work(Evidence("full", {}, rows)).verdict == verdict


@pytest.mark.parametrize(
    ("scale", "unlike", "verdict"),
    [
        ("full", 0.82, Verdict.PASS),
        ("full", 0.81, Verdict.FAIL),
        ("small", 0.82, Verdict.NOT_COMPARABLE),
        ("small", 0.6, Verdict.NOT_COMPARABLE),
    ],
)
def test_accuracy_is_flat_in_h(scale: str, unlike: float, verdict: Verdict, tmp_path: Path) -> None:
    jobs = [
        job(name, 0, accuracies(0.1, end), axes={"problem.partition.h": h})
        for name, ends in (("local-gecl", (unlike, 0.835)), ("gossip", (0.5, 0.83)))
        for h, end in zip(("0.1", "inf"), ends, strict=True)
    ]
    record = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    found = flat_in_h(Evidence(scale, {RING.by_h: record}), RING)
    assert found.verdict == verdict
    assert found.ours == f"{100 * (0.835 - unlike):.2f} points; Gossip 33.00"
