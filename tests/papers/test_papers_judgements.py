"""Verdicts of a made-up paper: counted, written down, read back and filled into documents."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import holdfast

from holdfast_papers.base import (
    Claim,
    Paper,
    Verdict,
    judged,
    judged_by_seeds,
)
from holdfast_papers.verdicts import count_text, read_judgement


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
    assert "![Squares, small scale](figures/tiny-squares-small.png)" in text
    assert (tmp_path / "figures/tiny-squares-small.png").exists()
    assert text.endswith("Words.\n\n" + place.format("curves"))
    again = holdfast("paper", "fill", document)
    assert again.code == 0
    assert document.read_text() == text


def test_filling_a_document_records_its_verdicts_for_programs(paper: Paper, tmp_path: Path) -> None:
    for experiment in ("squares", "curves"):
        holdfast("paper", "run", f"tiny/{experiment}")
    document = tmp_path / "tiny.md"
    place = "<!-- holdfast paper run tiny/{} --scale small -->\n<!-- end -->\n"
    document.write_text(place.format("squares") + place.format("curves"))
    holdfast("paper", "fill", document)
    assert json.loads((tmp_path / "verdicts/tiny.json").read_text()) == {
        "tiny/squares small": {"Three squared is eight": "FAIL"},
        "tiny/curves small": {"It learns": "PASS", "It flies": "NOT COMPARABLE"},
    }
    (tmp_path / "README.md").write_text("<!-- holdfast paper counts -->\n<!-- end -->\n")
    assert holdfast("paper", "fill", "README.md").code == 0
    counts = "1 of 2 claims hold; not counted: 1 NOT COMPARABLE"
    assert f"| [tiny](tiny.md) | not run | {counts} |" in (tmp_path / "README.md").read_text()


def test_only_what_a_paper_claims_is_counted(paper: Paper, tmp_path: Path) -> None:
    wrong, right = (lambda e, holds=holds: judged(holds, "9", "8") for holds in (False, True))
    claims = [
        Claim("printed and refuted", "8", wrong, kind="erratum"),
        Claim("printed, refuted by nobody", "9", right, kind="erratum"),
        Claim("a level of ours", "–", right, kind="ours"),
        Claim("a second reading", "–", wrong, kind="ours"),
    ]
    paper.experiments[1] = replace(paper.experiment("squares"), claims=claims)
    outcome = holdfast("paper", "run", "tiny/squares")
    assert outcome.code == 0
    judgement = read_judgement(tmp_path / "runs/papers/tiny/squares/small")
    assert judgement is not None
    verdicts = [claim.verdict for claim in judgement.claims]
    assert verdicts == ["ERRATUM", "PASS", "OURS: HOLDS", "OURS: FAILS"]
    counted = "1 of 1 claims hold; not counted: 1 ERRATUM, 1 OURS: HOLDS, 1 OURS: FAILS"
    assert count_text(verdicts) == counted


def test_a_verdict_over_seeds_says_how_sure_it_is(paper: Paper, tmp_path: Path) -> None:
    margins = [np.array([5.0, 6.0, 7.0]), np.array([1.0, 2.0, 3.0])]
    claims = [Claim("It leads", "yes", lambda e: judged_by_seeds(margins, "1 to 3", "more than 0"))]
    paper.experiments[1] = replace(paper.experiment("squares"), claims=claims)
    assert "3 of 3 seeds" in holdfast("paper", "run", "tiny/squares").out
    judgement = read_judgement(tmp_path / "runs/papers/tiny/squares/small")
    assert judgement is not None
    assert judgement.shown == {"It leads": "PASS (3 of 3 seeds, p = 0.037)"}
    text = (tmp_path / "runs/papers/tiny/squares/small/verdict.md").read_text()
    assert (
        "| **PASS** (3 of 3 seeds, p = 0.037) | more than 0 |" in text
    )  # t = 2 sqrt(3), 2 degrees of freedom


def test_what_is_not_a_number_fails() -> None:
    met, unknown = np.array([1.0, 2.0]), np.array([np.nan, 2.0])
    for margins in ([met, unknown], [unknown, met], [unknown]):
        found = judged_by_seeds(margins, "", "")
        assert (found.verdict, found.sure) == (Verdict.FAIL, "1 of 2 seeds")
    assert judged_by_seeds([met, np.array([np.inf, 1.0])], "", "").verdict == Verdict.PASS


def test_what_is_finished_is_judged_without_running_more(paper: Paper, tmp_path: Path) -> None:
    gossip = Claim(
        "Gossip learns", "yes", lambda e: judged(bool(e.curve("gossip", h=0.5).rounds[-1]), "", "")
    )
    curves = paper.experiment("curves")
    paper.experiments[0] = replace(curves, claims=[*curves.claims, gossip])
    command = ("paper", "run", "tiny/curves", "--scale", "full")
    assert "no finished run of tiny/curves" in holdfast(*command, "--no-run").err
    for seed in (0, 1):
        holdfast(*command, "--seed", seed)
    folder = tmp_path / "runs/papers/tiny/curves/full"
    runs = sorted((folder / "curves").glob("*/summary.json"))
    for file, missing in zip(runs, (2, 1), strict=True):  # of four jobs; gossip with h = 0.5 in both
        summary = json.loads(file.read_text())
        jobs = sorted(summary["jobs"], key=lambda job: (job["algorithm"], *job["axes"].values()))
        for job in jobs[:missing]:
            job["status"] = "interrupted"
        file.write_text(json.dumps({**summary, "status": "interrupted"}))
    assert holdfast(*command, "--no-run").code == 0
    assert sorted((folder / "curves").glob("*/summary.json")) == runs
    judgement = read_judgement(folder)
    assert judgement is not None
    assert [claim.verdict for claim in judgement.claims] == ["PASS", "NOT COMPARABLE", "NOT COMPARABLE"]
    assert judgement.note == "Judged as far as it was run, by jobs: `curves` 3 of 8."
    assert list(judgement.seeds) == [1]


def test_a_document_without_places_is_an_error(paper: Paper, tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("nothing")
    assert "has no place for a verdict" in holdfast("paper", "fill", "empty.md").err


def test_a_judgement_is_read_back(paper: Paper, tmp_path: Path) -> None:
    assert read_judgement(tmp_path) is None
    holdfast("paper", "run", "tiny/squares")
    judgement = read_judgement(tmp_path / "runs/papers/tiny/squares/small")
    assert judgement is not None
    assert judgement.name == "tiny/squares"
    assert judgement.count(Verdict.FAIL) == 1
    assert (judgement.device, judgement.seeds) == ("cpu", [])


@pytest.mark.parametrize(("scale", "seeds"), [("small", 1), ("full", 2)])
def test_a_judgement_knows_device_and_seeds(paper: Paper, tmp_path: Path, scale: str, seeds: int) -> None:
    holdfast("paper", "run", "tiny/curves", "--scale", scale)
    judgement = read_judgement(tmp_path / "runs/papers/tiny/curves" / scale)
    assert judgement is not None
    assert (judgement.device, judgement.seeds) == ("cpu", [seeds])
    assert judgement.command == f"holdfast paper run tiny/curves --scale {scale}"
