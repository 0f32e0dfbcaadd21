"""The pages in docs/papers: they show what the code claims, and a run at small scale ends as they say.

Running everything again takes up to an hour: only what is computed in seconds is in the slow suite. For all:

    HOLDFAST_PAPERS=all HOLDFAST_DATA=<folder> make test-slow

HOLDFAST_PAPERS_RUNS=<folder> takes what ``holdfast paper run all --runs-dir <folder>`` has finished there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from command_line import holdfast

from holdfast_papers.base import Paper, PaperExperiment
from holdfast_papers.catalogue import find_experiments
from holdfast_papers.commands import experiment_folder
from holdfast_papers.evidence import Scale
from holdfast_papers.verdicts import Shown, read_judgement, read_verdicts, verdict_record

PAGES = Path(__file__).parents[2] / "docs" / "papers"
EXPERIMENTS = [
    pytest.param(paper, experiment, id=f"{paper.id}/{experiment.id}")
    for paper, experiment in find_experiments("all")
]
NEEDS_DATA = "runs for minutes on data: set HOLDFAST_PAPERS=all and HOLDFAST_DATA"


def page_of(paper: Paper) -> Path:
    return PAGES / f"{paper.id}.md"


def recorded(paper: Paper, experiment: PaperExperiment, scale: Scale) -> Shown:
    """The verdicts that the page shows."""
    shown = read_verdicts(verdict_record(page_of(paper))).get(f"{paper.id}/{experiment.id} {scale}")
    if shown is None and scale == "full":
        pytest.skip("the page shows no run at full scale")
    assert shown is not None, f"{page_of(paper)} shows no run of {experiment.id} at small scale"
    return shown


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize(("paper", "experiment"), EXPERIMENTS)
def test_the_page_has_a_verdict_for_every_claim(
    paper: Paper, experiment: PaperExperiment, scale: Scale
) -> None:
    verdicts = recorded(paper, experiment, scale)
    assert list(verdicts) == [claim.says for claim in experiment.claims]
    start = f"<!-- holdfast paper run {paper.id}/{experiment.id} --scale {scale} -->"
    place = page_of(paper).read_text(encoding="utf-8").split(start)[1].split("<!-- end -->")[0]
    lines = [line for line in place.splitlines() if "**" in line]
    assert len(lines) == len(verdicts)
    for line, (says, verdict) in zip(lines, verdicts.items(), strict=True):
        assert line.startswith("| " + says.replace("|", "\\|") + " |"), line
        shown = re.split(r"(?<!\\)\|", line)[4]
        assert shown.replace("*", "").strip().startswith(verdict), line


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "experiment"), EXPERIMENTS)
def test_a_run_at_small_scale_ends_as_the_page_says(
    paper: Paper, experiment: PaperExperiment, tmp_path: Path
) -> None:
    if experiment.presets and os.environ.get("HOLDFAST_PAPERS") != "all":
        pytest.skip(NEEDS_DATA)
    runs = Path(os.environ.get("HOLDFAST_PAPERS_RUNS", tmp_path))
    outcome = holdfast("paper", "run", f"{paper.id}/{experiment.id}", "--runs-dir", runs)
    assert outcome.code in (0, 1), outcome.err
    judgement = read_judgement(experiment_folder(runs, paper.id, experiment.id, "small"))
    assert judgement is not None
    assert alike(judgement.shown) == alike(recorded(paper, experiment, "small"))


def alike(verdicts: Shown) -> dict[str, str]:
    """Verdicts by claim; one that is not sure may fall the other way where rounding is different."""
    return {
        says: "not sure" if "not sure" in words else words.partition(" (")[0]
        for says, words in verdicts.items()
    }


def test_the_readme_counts_as_the_overview_does() -> None:
    """The front page has small scale first; the overview, which the commands fill in, full scale."""
    row = r"^\| \[[^\]]+\]\((?:docs/papers/)?([\w-]+)\.md\) \|([^|]*)\|([^|]*)\|"
    counts: dict[str, dict[str, list[str]]] = {}
    for name, page in (("front", PAGES.parents[1] / "README.md"), ("overview", PAGES / "README.md")):
        rows = re.findall(row, page.read_text(encoding="utf-8"), re.MULTILINE)
        counts[name] = {
            paper: [" ".join(re.findall(r"\d+ of \d+", c)) for c in cells] for paper, *cells in rows
        }
    assert len(counts["front"]) >= 5
    assert counts["front"] == {paper: cells[::-1] for paper, cells in counts["overview"].items()}
