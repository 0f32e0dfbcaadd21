"""What claims look at and figures show, of small runs whose numbers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_run import accuracies, job, troubled_sweep, two_algorithms, write_run
from scipy.stats import ttest_1samp

from holdfast.core.errors import HoldfastError
from holdfast.experiments.record import load_record
from holdfast_papers.base import Claim, Layout, Line, Panel, Paper, PaperExperiment, Preset, Verdict, judged
from holdfast_papers.drawing import draw
from holdfast_papers.evidence import Evidence, mean_text, scientific_text, sureness
from holdfast_papers.verdicts import Judgement, judge, markdown

LINES = [Line("ours", "local-gecl"), Line("theirs", "gossip")]


def evidence(folder: Path) -> Evidence:
    return Evidence("small", {"two": load_record(two_algorithms(folder / "two"))})


def test_a_curve_has_one_value_per_seed(tmp_path: Path) -> None:
    curve = evidence(tmp_path).curve("local-gecl")
    np.testing.assert_allclose(curve.final("test_accuracy"), [0.9, 0.94])
    np.testing.assert_allclose(curve.at("test_accuracy", 15), [0.8, 0.7])
    np.testing.assert_allclose(curve.at("test_accuracy", 1000, of="gradient_evaluations"), [0.8, 0.7])
    np.testing.assert_allclose(curve.first("round", "test_accuracy", low=0.75), [10, 20])
    np.testing.assert_allclose(curve.first("round", "test_accuracy", low=0.92), [np.inf, 20])
    np.testing.assert_allclose(curve.lowest("train_loss"), [0.1, 0.06])
    assert curve.path("test_accuracy").shape == (2, 3)


def test_a_best_value_need_not_be_the_last(tmp_path: Path) -> None:
    np.testing.assert_allclose(evidence(tmp_path).curve("gossip").best("test_accuracy"), [0.6, 0.6])


def test_curves_are_found_by_swept_values_however_they_are_written(tmp_path: Path) -> None:
    sweep = Evidence("small", {"sweep": load_record(troubled_sweep(tmp_path / "run"))})
    assert sweep.swept("lr") == ["0.1", "0.01"]
    for lr in (0.1, "0.1", "0.10"):
        assert sweep.curve("local-gecl", lr=lr).name == "local-gecl lr=0.1"
    assert len(sweep.curves(lr=0.01)) == 2
    assert sweep.curve("<b>&gossip", "sweep", lr=0.1).broke_off


def test_presets_are_paired_by_the_seeds_that_all_of_them_have(tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", [job("d-scaffold", 1, accuracies(0.1, 0.5, 0.7))])
    found = Evidence("full", {**evidence(tmp_path).runs, "other": load_record(other)}, partial=True)
    pair = found.paired("two", "other")
    gain = pair.curve("local-gecl", "two").final("test_accuracy") - pair.curve("d-scaffold", "other").final(
        "test_accuracy"
    )
    np.testing.assert_allclose(gain, [0.24])
    assert len(found.curve("local-gecl", "two").final("test_accuracy")) == 2


@pytest.mark.parametrize("where", [{}, {"lr": 0.5}, {"h": 0.1}])
def test_a_curve_that_is_not_there_is_an_error_that_names_those_that_are(where: dict, tmp_path: Path) -> None:
    sweep = Evidence("small", {"sweep": load_record(troubled_sweep(tmp_path / "run"))})
    with pytest.raises(
        HoldfastError, match=r"expected one; there are local-gecl lr=0\.1, local-gecl lr=0\.01"
    ):
        sweep.curve("local-gecl", **where)


def test_wrong_columns_presets_and_times_are_errors(tmp_path: Path) -> None:
    found = evidence(tmp_path)
    with pytest.raises(HoldfastError, match="unknown column 'test_acuracy': did you mean 'test_accuracy'"):
        found.curve("gossip").final("test_acuracy")
    with pytest.raises(HoldfastError, match="unknown preset 'three'"):
        found.curve("gossip", "three")
    with pytest.raises(HoldfastError, match="nothing was recorded up to round = -1"):
        found.curve("gossip").at("test_accuracy", -1)


def test_a_claim_that_cannot_be_judged_fails_with_the_reason(tmp_path: Path) -> None:
    claim = Claim("?", "!", lambda e: judged(bool(e.curve("nobody").final("x") > 0), "", ""))
    experiment = PaperExperiment("one", "One", [claim], presets=[Preset("two")])
    (found,) = judgement(experiment, evidence(tmp_path)).claims
    assert found.verdict == Verdict.FAIL
    assert "0 curves match 'nobody'" in found.reason


def judgement(experiment: PaperExperiment, found: Evidence) -> Judgement:
    return judge(Paper("p", "", "", Path()), experiment, found, "here", "cpu", 1.0)


ASKED = {
    "path": lambda curve: curve.path("test_accuracy"),
    "final": lambda curve: curve.final("test_accuracy"),
    "best": lambda curve: curve.best("test_accuracy"),
    "lowest": lambda curve: curve.lowest("test_accuracy"),
    "at": lambda curve: curve.at("test_accuracy", 0),
    "first": lambda curve: curve.first("round", "test_accuracy", low=0.0),
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize(
    ("algorithm", "lr", "reason"),
    [
        ("<b>&gossip", 0.1, "<b>&gossip lr=0.1: 1 of 2 seeds diverged at round 20"),
        ("local-gecl", 0.01, "local-gecl lr=0.01: 1 of 2 seeds unfinished"),
        ("<b>&gossip", 0.01, "<b>&gossip lr=0.01: 2 of 2 seeds unfinished"),
    ],
)
def test_a_curve_without_an_end_makes_its_claim_fail(asked, algorithm, lr, reason, tmp_path: Path) -> None:
    """Even where all seeds have recorded what is asked for, such as round 0."""
    sweep = Evidence("small", {"sweep": load_record(troubled_sweep(tmp_path / "run"))})
    claims = [
        Claim("holds", "!", lambda e: judged(asked(e.curve("local-gecl", lr=0.1)).min() >= 0, "", "")),
        Claim("?", "!", lambda e: judged(asked(e.curve(algorithm, lr=lr)).min() >= 0, "", "")),
    ]
    experiment = PaperExperiment(
        "one",
        "One",
        claims,
        presets=[Preset("sweep")],
        table=lambda e: (["a"], [[mean_text(asked(e.curve(algorithm, lr=lr)))]]),
    )
    found = judgement(experiment, sweep)
    assert [claim.reason for claim in found.claims] == ["", f"cannot be judged: {reason}"]
    assert [claim.verdict for claim in found.claims] == [Verdict.PASS, Verdict.FAIL]
    assert found.table == (["no table"], [[reason]])


@pytest.mark.parametrize(
    ("device", "seeds", "option", "words"),
    [("cpu", 2, "", ", 2 seeds"), ("cuda", 1, " --device cuda", ", one seed"), ("cpu", 0, "", "")],
)
def test_a_judgement_says_how_it_came_about(device, seeds, option, words, tmp_path: Path) -> None:
    jobs = [job("a", seed, accuracies(0.1, 0.2)) for seed in range(seeds)]
    runs = {"two": load_record(write_run(tmp_path / "run", jobs))} if seeds else {}
    experiment = PaperExperiment("one", "One", [], presets=[Preset("two", ["rounds=1"])])
    found = judge(Paper("p", "", "", tmp_path), experiment, Evidence("small", runs), "here", device, 1.0)
    assert (found.scale, found.device, found.seeds) == ("small", device, [seeds] if seeds else [])
    assert found.changes == {"two": ["rounds=1"]}
    assert found.command == f"holdfast paper run p/one --scale small{option}"
    assert found.circumstances == f"here: 1.0 s of training and computing{words}"
    assert f"`{found.command}` on {found.circumstances}." in markdown(found)


def test_numbers_are_shown_with_their_spread() -> None:
    assert mean_text([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert mean_text([0.5], digits=1, unit="%") == "0.5 %"
    assert mean_text([1.0, np.inf]) == "inf"  # such as a delay that one seed never needs
    assert scientific_text([1e-9, 3e-9, 2e-9]) == "2.0e-09 (1.0e-09 to 3.0e-09)"


def test_a_figure_has_the_papers_panels_and_curves(tmp_path: Path) -> None:
    jobs = [
        job(name, 0, accuracies(0.1, end), axes={"problem.partition.h": h})
        for name, end in (("local-gecl", 0.9), ("gossip", 0.5))
        for h in ("0.5", "inf")
    ]
    run = load_record(write_run(tmp_path / "run", jobs, axes=("problem.partition.h",)))
    panels = [Panel("(a) curves", LINES, each="h"), Panel("(b) ends", LINES, x="h", x_label="likeness")]
    left, right = draw(Layout(panels), Evidence("small", {"run": run})).axes
    assert [line.get_label() for line in left.lines] == [
        "ours, h = 0.5",
        "ours, h = ∞",
        "theirs, h = 0.5",
        "theirs, h = ∞",
    ]
    np.testing.assert_allclose(left.lines[0].get_ydata(), [10, 90])
    np.testing.assert_allclose(right.lines[1].get_ydata(), [50, 50])
    assert [text.get_text() for text in right.get_xticklabels()] == ["0.5", "∞"]
    assert right.get_xlabel() == "likeness"
    assert left.lines[0].get_color() == left.lines[1].get_color() == right.lines[0].get_color()


def test_the_settings_of_a_single_method_are_told_apart_by_colour(tmp_path: Path) -> None:
    """Also where another panel has more than one method."""
    axis = "algorithm.rho"
    jobs = [job("local-gecl", 0, accuracies(0.1, 0.9), axes={axis: rho}) for rho in ("0.1", "0.2")]
    jobs += [job("gossip", 0, accuracies(0.1, 0.5), axes={axis: "0.1"})]
    run = load_record(write_run(tmp_path / "run", jobs, axes=(axis,)))
    panels = [
        Panel("(a)", [line._replace(where={"rho": "0.1"}) for line in LINES]),
        Panel("(b)", LINES[:1], each="rho"),
    ]
    both, one = draw(Layout(panels), Evidence("small", {"run": run})).axes
    assert [line.get_label() for line in one.lines] == ["ours, ρ = 0.1", "ours, ρ = 0.2"]
    assert len({line.get_color() for line in (*both.lines, *one.lines)}) == 4


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        ([1.0], "one seed"),
        ([1.0, 1.0, 1.0], "3 of 3 seeds, p < 0.001"),
        ([1.0, 2.0, 3.0], "3 of 3 seeds, p = 0.037"),
        ([-1.0, -2.0, -3.0], "0 of 3 seeds, p = 0.037"),
        ([-1.0, 1.0, 3.0], "2 of 3 seeds, p = 0.24, not sure"),
        ([-np.inf, 1.0], "1 of 2 seeds"),
    ],
)
def test_sureness_counts_seeds_and_tests_their_mean(margin: list[float], words: str) -> None:
    assert sureness(np.array(margin)) == words
    finite = np.isfinite(margin).all() and len(set(margin)) > 1
    if finite:  # the independent calculation of the same p
        side = "greater" if np.mean(margin) > 0 else "less"
        assert f"p = {ttest_1samp(margin, 0, alternative=side).pvalue:.2g}" in words
