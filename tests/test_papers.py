"""Papers as executable claims, tried on a made-up paper about the embedded digits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import holdfast
from sample_run import accuracies, job, troubled_sweep, two_algorithms, write_run

from holdfast.errors import HoldfastError
from holdfast.papers.base import (
    Circumstances,
    Claim,
    Experiment,
    Layout,
    Line,
    Panel,
    Paper,
    Preset,
    Verdict,
    judged,
    not_comparable,
)
from holdfast.papers.catalogue import MODULES, PAPERS, find_experiments, load_papers
from holdfast.papers.drawing import draw
from holdfast.papers.evidence import Evidence, mean_text, scientific_text
from holdfast.papers.execution import Task, locked
from holdfast.papers.verdicts import judge, read_judgement
from holdfast.runs.plan import Plan
from holdfast.runs.record import load_record
from holdfast.runs.runner import Runner

PRESET = """\
name = "tiny"
rounds = 6
seeds = [0, 1]

[problem]
dataset = "digits"
nodes = 4
partition = { name = "dirichlet", h = [0.5, inf] }
model = "linear"

[network]
topology = "ring"

[evaluation]
every = 2
metrics = ["test_accuracy", "train_loss"]

[[algorithm]]
name = "local-gecl"
lr = 0.1
local_steps = 4

[[algorithm]]
name = "gossip"
lr = 0.1
local_steps = 4
"""
LINES = [Line("ours", "local-gecl"), Line("theirs", "gossip")]


def learns(e: Evidence):
    gain = e.curve("local-gecl", h=0.5).final("test_accuracy") - e.curve("local-gecl", h=0.5).at(
        "test_accuracy", 0
    )
    return judged(bool(gain.mean() > 0), mean_text(100 * gain, unit="points"), "more than 0")


def squares(where: Circumstances):
    return [{"what": "square", "n": n, "value": n**2} for n in range(1, 4)]


def tiny_paper(folder: Path) -> Paper:
    (folder / "curves.toml").write_text(PRESET)
    (folder / "absent.toml").write_text(PRESET.replace('"digits"', '"mnist"'))
    (folder / "absent-too.toml").write_text(PRESET.replace('"digits"', '"cifar10"'))
    return Paper(
        "tiny",
        "A tiny paper",
        "nobody, nowhere",
        folder,
        [
            Experiment(
                "curves",
                "Curves | of digits",
                [
                    Claim("It learns", "yes", learns),
                    Claim("It flies", "no", lambda e: not_comparable("–", "no wings")),
                ],
                presets=[Preset("curves", ["seeds=[0]", "rounds=4"])],
                layout=Layout(
                    [Panel("(a)", LINES, each="h"), Panel("(b)", LINES, x="h", y="train_loss")], columns=2
                ),
            ),
            Experiment(
                "squares",
                "Squares",
                [Claim("Three squared is eight", "8", lambda e: judged(e.rows[-1]["value"] == 8, "9", "8"))],
                compute=squares,
                layout=Layout(
                    [
                        Panel(
                            "squares",
                            [Line("n²", "square")],
                            x="n",
                            y="value",
                            by="what",
                            log_x=True,
                            log_y=True,
                        )
                    ]
                ),
                table=lambda e: (["n", "n²"], [[str(row["n"]), str(row["value"])] for row in e.rows]),
            ),
            Experiment(
                "absent", "Data that are not there", [], presets=[Preset("absent"), Preset("absent-too")]
            ),
        ],
    )


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    (tmp_path / "package").mkdir()
    tiny = tiny_paper(tmp_path / "package")
    monkeypatch.setitem(PAPERS, "tiny", tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    return tiny


# --- the command -------------------------------------------------------------------------------------------


def test_the_papers_and_their_experiments_are_listed(paper: Paper) -> None:
    outcome = holdfast("paper")
    assert outcome.code == 0
    assert all(name in outcome.out for name in (*MODULES, "A tiny paper", "squares", "(2 claims)"))


def test_a_run_leaves_verdict_figure_and_run_directory(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny/curves")
    assert outcome.code == 0
    assert "PASS" in outcome.out
    assert "NOT COMPARABLE" in outcome.out
    folder = tmp_path / "runs/papers/tiny/curves/small"
    assert (folder / "figure.png").stat().st_size > 5000
    text = (folder / "verdict.md").read_text()
    assert "| It learns | yes |" in text
    assert "`seeds=[0]`" in text
    (run,) = (folder / "curves").iterdir()
    assert {row["round"] for row in load_record(run).rows} == {0, 2, 4}
    assert not list((run / "checkpoints").iterdir())


def test_full_scale_is_the_preset_as_it_stands(paper: Paper, tmp_path: Path) -> None:
    assert holdfast("paper", "run", "tiny/curves", "--scale", "full").code == 0
    (run,) = (tmp_path / "runs/papers/tiny/curves/full/curves").iterdir()
    assert {(row["seed"], row["round"]) for row in load_record(run).rows} == {
        (seed, r) for seed in (0, 1) for r in (0, 2, 4, 6)
    }


def test_a_failed_claim_is_exit_code_1(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny/squares")
    assert outcome.code == 1
    assert "FAIL" in outcome.out
    verdict = json.loads((tmp_path / "runs/papers/tiny/squares/small/verdict.json").read_text())
    assert verdict["claims"][0]["verdict"] == "FAIL"
    assert verdict["table"] == [["n", "n²"], [["1", "1"], ["2", "4"], ["3", "9"]]]


def test_a_finished_run_is_not_repeated_and_a_changed_preset_is_run_anew(
    paper: Paper, tmp_path: Path
) -> None:
    holdfast("paper", "run", "tiny/curves")
    folder = tmp_path / "runs/papers/tiny/curves/small/curves"
    (run,) = folder.iterdir()
    before = (run / "metrics.csv").stat().st_mtime_ns
    holdfast("paper", "run", "tiny/curves")
    assert list(folder.iterdir()) == [run]
    assert (run / "metrics.csv").stat().st_mtime_ns == before
    (paper.folder / "curves.toml").write_text(PRESET.replace("lr = 0.1", "lr = 0.2"))
    holdfast("paper", "run", "tiny/curves")
    assert len(list(folder.iterdir())) == 2


class StopAfterFirstJob:
    """A view that breaks a run off, as a second Ctrl-C does."""

    def job_started(self, *given: object) -> None: ...
    def job_prepared(self, *given: object) -> None: ...
    def round_done(self, *given: object) -> None: ...
    def row_recorded(self, *given: object) -> None: ...
    def job_ended(self, *given: object) -> None:
        raise KeyboardInterrupt


def test_a_run_that_was_stopped_is_continued(paper: Paper, tmp_path: Path) -> None:
    folder = tmp_path / "runs/papers/tiny/curves/small/curves"
    experiment = paper.experiment("curves")
    task = Task(paper, experiment, experiment.presets[0], Circumstances("small", "cpu", None), folder)
    begun = Runner.start(task.plan(), folder)
    with pytest.raises(KeyboardInterrupt):
        begun.execute([StopAfterFirstJob()])
    first = [row["seconds"] for row in load_record(begun.folder).rows]
    assert len(first) == 3
    assert holdfast("paper", "run", "tiny/curves").code == 0
    assert list(folder.iterdir()) == [begun.folder]
    record = load_record(begun.folder)
    assert record.summary["status"] == "complete"
    assert [row["seconds"] for row in record.rows[:3]] == first


def test_missing_data_are_all_named_before_anything_runs(paper: Paper, tmp_path: Path) -> None:
    outcome = holdfast("paper", "run", "tiny")
    assert outcome.code == 2
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: tiny/absent: dataset 'mnist' not found")
    assert "put the four IDX files" in lines[0]
    assert "dataset 'cifar10' not found" in lines[1]
    assert not (tmp_path / "runs").exists()


def test_two_processes_do_not_run_the_same_experiment(paper: Paper, tmp_path: Path) -> None:
    with locked(tmp_path / "runs/papers/tiny/curves/small"):
        outcome = holdfast("paper", "run", "tiny/curves")
    assert outcome.code == 2
    assert "another process is running this experiment" in outcome.err


@pytest.mark.parametrize(
    ("wanted", "near"), [("local-gcl", "local-gecl"), ("tiny/curve", "curves"), ("tiny/x", "squares")]
)
def test_an_unknown_name_is_one_line_with_the_nearest(paper: Paper, wanted: str, near: str) -> None:
    outcome = holdfast("paper", "run", wanted)
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1
    assert near in outcome.err


def test_a_document_is_filled_where_it_says_so(paper: Paper, tmp_path: Path) -> None:
    holdfast("paper", "run", "tiny/squares")
    document = tmp_path / "tiny.md"
    place = "<!-- holdfast paper run tiny/{} --scale small -->\nold\n<!-- end -->\n"
    document.write_text("# Tiny\n\n" + place.format("squares") + "\nWords.\n\n" + place.format("curves"))
    outcome = holdfast("paper", "fill", document)
    assert outcome.code == 0
    assert "left as it was" in outcome.out
    text = document.read_text()
    assert "| Three squared is eight | 8 | 9 | **FAIL** | 8 |" in text
    assert "![Squares](figures/tiny-squares-small.png)" in text
    assert (tmp_path / "figures/tiny-squares-small.png").exists()
    assert text.endswith("Words.\n\n" + place.format("curves"))
    again = holdfast("paper", "fill", document)
    assert again.code == 0
    assert document.read_text() == text


def test_a_document_without_places_is_an_error(paper: Paper, tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("nothing")
    assert "has no place for a verdict" in holdfast("paper", "fill", "empty.md").err


# --- evidence ----------------------------------------------------------------------------------------------


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
    assert sweep.curve("<b>&gossip", "sweep", lr=0.1).diverged


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
    experiment = Experiment("one", "One", [claim], presets=[Preset("two")])
    (found,) = judge(
        Paper("p", "", "", tmp_path), experiment, "small", evidence(tmp_path), "here", 1.0
    ).claims
    assert found.verdict == Verdict.FAIL
    assert "0 curves match 'nobody'" in found.reason


def test_numbers_are_shown_with_their_spread() -> None:
    assert mean_text([1.0, 2.0, 3.0]) == "2.00 ± 1.00"
    assert mean_text([0.5], digits=1, unit="%") == "0.5 %"
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


# --- the papers that there are -----------------------------------------------------------------------------

ALL = find_experiments("all")
PRESETS = [
    pytest.param(paper, experiment, preset, scale, id=f"{paper.id}-{preset.file}-{scale}")
    for paper, experiment in ALL
    for preset in experiment.presets
    for scale in ("small", "full")
]


@pytest.mark.parametrize(("of", "experiment", "preset", "scale"), PRESETS)
def test_every_preset_is_an_experiment_of_the_library(
    of: Paper, experiment: Experiment, preset: Preset, scale: str, tmp_path: Path
) -> None:
    task = Task(of, experiment, preset, Circumstances(scale, "cpu", None), tmp_path)
    assert Plan(task.raw, None, "cpu").jobs


@pytest.mark.parametrize("paper", load_papers().values(), ids=lambda paper: paper.id)
def test_every_preset_file_belongs_to_one_experiment(paper: Paper) -> None:
    files = [preset.file for experiment in paper.experiments for preset in experiment.presets]
    assert sorted(files) == sorted(path.stem for path in paper.folder.glob("*.toml"))
    assert len({experiment.id for experiment in paper.experiments}) == len(paper.experiments)


@pytest.mark.parametrize("experiment", [each for _, each in ALL], ids=lambda each: each.id)
def test_every_experiment_makes_claims_and_shows_something(experiment: Experiment) -> None:
    assert experiment.claims
    assert experiment.layout or experiment.table


def test_a_judgement_is_read_back(paper: Paper, tmp_path: Path) -> None:
    assert read_judgement(tmp_path) is None
    holdfast("paper", "run", "tiny/squares")
    judgement = read_judgement(tmp_path / "runs/papers/tiny/squares/small")
    assert judgement is not None
    assert judgement.name == "tiny/squares"
    assert judgement.count(Verdict.FAIL) == 1
