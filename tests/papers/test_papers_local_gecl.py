"""The claims of Local G-ECL on figures that are made up: the paper's own hold, others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from paper_checks import failing, verdicts
from sample_run import accuracies, job, write_run

from holdfast.experiments.record import load_record
from holdfast_papers.base import Verdict
from holdfast_papers.evidence import Evidence
from holdfast_papers.local_gecl.figure_1 import RING, flat_in_h
from holdfast_papers.local_gecl.table_3 import TABLE_3, as_printed

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
    assert verdicts(TABLE_3, table_3(tmp_path)) == [Verdict.PASS] * 4


@pytest.mark.parametrize(
    ("line", "step", "by", "places"),
    [
        ("local-gecl", "0.003125", 0.9, [0]),  # another best step
        ("d-scaffold", "0.2", 1.2, [1]),  # a column further apart than a point
        ("gossip", "0.00078125", 2.1, [2]),  # less than six points below
        ("gossip", "0.003125", 9.0, []),  # Gossip's level is not checked, only its distance
    ],
)
def test_each_claim_fails_alone(line: str, step: str, by: float, places: list[int], tmp_path: Path) -> None:
    assert failing(TABLE_3, table_3(tmp_path, **{line: changed(line, step, by)})) == places


def test_a_level_more_than_three_points_off_fails(tmp_path: Path) -> None:
    both = {name: [value - 3.1 for value in PRINTED[name]] for name in ("local-gecl", "d-scaffold")}
    gossip = [value - 3.1 for value in PRINTED["gossip"]]
    found = verdicts(TABLE_3, table_3(tmp_path, **both, gossip=gossip))
    assert found == [Verdict.PASS, Verdict.PASS, Verdict.PASS, Verdict.FAIL]


def test_small_scale_asks_for_the_sign_only(tmp_path: Path) -> None:
    near = [value - 0.3 for value in PRINTED["local-gecl"]]
    found = verdicts(TABLE_3, table_3(tmp_path, "small", gossip=near))
    assert found == [Verdict.NOT_COMPARABLE, Verdict.PASS, Verdict.PASS, Verdict.NOT_COMPARABLE]


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
