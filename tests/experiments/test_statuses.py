"""Done, diverged, failed and interrupted are four things, in the files, the terminal and the report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_line import SMALL, experiment_file, holdfast, make_plan
from report_page import Page
from sample_run import accuracies, job, write_run

import holdfast as hf
from holdfast.experiments.record import load_record
from holdfast.experiments.runner import Interrupted, Runner
from holdfast.report.html import report_html
from holdfast.report.terminal import summary_table
from holdfast.report.verdict import troubles, verdict

# Gossip keeps no duals, so that this metric cannot be computed for it.
CONVEX = SMALL.replace('model = { name = "mlp", hidden = [8] }', 'model = "linear"\nl2 = 0.1')
DUALS = ['metrics=["train_loss","dual_error"]', "rounds=2"]
WHY = "metric 'dual_error': Gossip keeps no estimate of the gradients at the optimum"


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run in which gossip fails, and what was printed."""
    root = tmp_path_factory.mktemp("failed")
    outcome = holdfast("run", experiment_file(root, CONVEX), *DUALS, "--runs-dir", root)
    assert (outcome.code, outcome.err) == (1, "")
    [folder] = root.glob("small-*")
    return folder, outcome.out


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_a_failure_is_no_divergence_in_the_files(failed: tuple[Path, str]) -> None:
    jobs = json.loads((failed[0] / "summary.json").read_text())["jobs"]
    assert [(job["algorithm"], job["status"], job.get("message")) for job in jobs] == [
        ("local-gecl", "done", None),
        ("gossip", "failed", WHY),
    ]


def test_a_failure_is_no_divergence_in_terminal_and_report(failed: tuple[Path, str]) -> None:
    folder, printed = failed
    reported = one_line(holdfast("report", folder).out)
    page = one_line(" ".join(Page((folder / "report.html").read_text()).words))
    for text in (one_line(printed), reported, page):
        assert f"gossip failed: {WHY}" in text
        assert "failed at round 0" in text
        assert "diverged" not in text
    assert "of 2 jobs, 1 done, 1 failed; 'holdfast resume" in page


def test_resume_tries_a_failed_job_again_and_no_other(failed: tuple[Path, str]) -> None:
    folder, _ = failed
    before = (folder / "models" / "000-local-gecl-seed0.safetensors").stat().st_mtime_ns
    outcome = holdfast("resume", folder)
    assert outcome.code == 1
    assert "so far: of 2 jobs, 1 done, 1 failed; only what is left is run" in one_line(outcome.out)
    assert f"gossip failed: {WHY}" in one_line(outcome.out)
    assert (folder / "models" / "000-local-gecl-seed0.safetensors").stat().st_mtime_ns == before


class Stop(hf.Callback):
    """Asks for a stop after the first round, as Ctrl-C does."""

    def on_round(self, job: object, round: int) -> None:
        if round == 1:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_job_is_called_so(tmp_path: Path) -> None:
    runner = Runner.start(make_plan(tmp_path), tmp_path)
    with pytest.raises(Interrupted):
        runner.execute([Stop()])
    record = load_record(runner.folder)
    assert [entry["status"] for entry in record.summary["jobs"]] == ["interrupted", "pending"]
    assert [row.note for row in record.final_table()] == ["interrupted at round 1", "not started"]
    [trouble] = troubles(record)
    assert trouble.startswith("This run was interrupted: of 2 jobs, 1 interrupted, 1 not started;")
    outcome = holdfast("resume", runner.folder)
    assert outcome.code == 0
    assert "so far: of 2 jobs, 1 interrupted, 1 not started" in one_line(outcome.out)
    summary = json.loads((runner.folder / "summary.json").read_text())
    assert [entry["status"] for entry in summary["jobs"]] == ["done", "done"]


def test_a_mistake_in_code_is_a_failure_too(tmp_path: Path) -> None:
    class Broken(Stop):
        """Breaks the algorithm under way, as a user's own might."""

        def on_prepared(self, *given: object) -> None:
            runner.plan.method(runner.plan.jobs[0]).__dict__["local_steps"] = None

    runner = Runner.start(make_plan(tmp_path, "rounds=1"), tmp_path)
    with pytest.raises(TypeError):
        runner.execute([Broken()])
    entry = json.loads((runner.folder / "summary.json").read_text())["jobs"][0]
    assert (entry["status"], entry["round"]) == ("failed", 0)
    assert entry["message"].startswith("TypeError: ")
    assert "\n" not in entry["message"]


def test_every_status_has_its_own_words(tmp_path: Path) -> None:
    jobs = [
        job("a", 0, accuracies(0.1, 0.2, 0.3)),
        job("b", 0, accuracies(0.1, 0.9), "failed", message="no more memory"),
        job("c", 0, accuracies(0.1, 0.9), "diverged", message="a figure became NaN"),
        job("d", 0, accuracies(0.1, 0.2), "interrupted"),
        job("e", 0, [], "pending"),
    ]
    record = load_record(write_run(tmp_path / "run", jobs, status="interrupted"))
    notes = ["", "failed at round 10", "diverged at round 10", "interrupted at round 10", "not started"]
    assert [row.note for row in record.final_table()] == notes
    assert [row.status for row in record.final_table()] == [
        "done",
        "failed",
        "diverged",
        "interrupted",
        "pending",
    ]
    # Neither what failed nor what diverged is ranked, whatever it reached.
    assert verdict([record]).startswith("a reaches 30.0")
    assert "b 90" not in verdict([record])
    caption = str(summary_table([record]).caption)
    told = " ".join(Page(report_html([record])).words)
    for label, note in zip("bcde", notes[1:], strict=True):
        assert f"{label}: {note}" in caption
        assert note in told
    assert "b failed: no more memory" in told
    assert "c diverged: a figure became NaN" in told
    assert "Failed: figures of the last round before the error." in told


@pytest.mark.parametrize(
    ("statuses", "words"),
    [
        (["failed", "failed"], "Every algorithm failed."),
        (["failed", "diverged"], "Every algorithm diverged or failed."),
    ],
)
def test_verdict_when_nothing_came_out(tmp_path: Path, statuses: list[str], words: str) -> None:
    jobs = [job(name, 0, accuracies(0.1), status) for name, status in zip("ab", statuses, strict=True)]
    assert verdict([load_record(write_run(tmp_path / "run", jobs))]) == words


def test_a_failed_seed_ends_the_curve_of_its_group(tmp_path: Path) -> None:
    jobs = [job("a", 0, accuracies(0.1, 0.2, 0.3)), job("a", 1, accuracies(0.1, 0.4), "failed")]
    [row] = load_record(write_run(tmp_path / "run", jobs)).final_table()
    assert (row.seeds, row.round, row.note) == (2, 10, "1 of 2 seeds failed at round 10")
