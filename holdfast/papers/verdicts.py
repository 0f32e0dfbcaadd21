"""Judges the claims of an experiment, and says so in the terminal and in files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from holdfast.errors import HoldfastError
from holdfast.files import write_atomic, write_json
from holdfast.papers.base import Claim, Experiment, Paper, Scale, Table, Verdict
from holdfast.papers.evidence import Evidence
from holdfast.report.format import seconds_text

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.NOT_COMPARABLE: "yellow"}


@dataclass(frozen=True)
class Judged:
    """A claim with what was found."""

    says: str
    paper: str
    ours: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Judgement:
    """All of an experiment's claims, and how the figures came about: the content of ``verdict.json``."""

    paper: str
    experiment: str
    title: str
    scale: Scale
    claims: list[Judged]
    changes: dict[str, list[str]]  # of every preset, what small scale changes in it
    table: Table | None
    note: str
    hardware: str
    seconds: float  # of training and computing

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.experiment}"

    @property
    def command(self) -> str:
        return f"holdfast paper run {self.name} --scale {self.scale}"

    def count(self, verdict: Verdict) -> int:
        return sum(claim.verdict == verdict for claim in self.claims)


def judge(
    paper: Paper, experiment: Experiment, scale: Scale, evidence: Evidence, hardware: str, seconds: float
) -> Judgement:
    """Asks every claim of ``experiment``."""
    changes = {preset.file: list(preset.small) for preset in experiment.presets if scale == "small"}
    return Judgement(
        paper=paper.id,
        experiment=experiment.id,
        title=experiment.title,
        scale=scale,
        claims=[_judged(claim, evidence) for claim in experiment.claims],
        changes=changes,
        table=experiment.table(evidence) if experiment.table else None,
        note=experiment.note,
        hardware=hardware,
        seconds=seconds,
    )


def _judged(claim: Claim, evidence: Evidence) -> Judged:
    try:
        finding = claim.check(evidence)
    except HoldfastError as error:  # such as a curve that ended too early: the claim was not shown
        return Judged(claim.says, claim.paper, "–", Verdict.FAIL, f"cannot be judged: {error}")
    return Judged(claim.says, claim.paper, finding.ours, finding.verdict, finding.reason)


def terminal_table(judgement: Judgement) -> RichTable:
    """The verdicts for the terminal."""
    table = RichTable(title=f"{judgement.name} ({judgement.scale}): {judgement.title}", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    for head, ratio in (("claim", 5), ("paper", 2), ("ours", 3), ("verdict", None), ("asked for", 3)):
        table.add_column(head, ratio=ratio, overflow="fold", min_width=10 if ratio is None else None)
    for claim in judgement.claims:
        verdict = Text(claim.verdict, style=f"bold {COLOURS[claim.verdict]}")
        table.add_row(Text(claim.says), Text(claim.paper), Text(claim.ours), verdict, Text(claim.reason))
    return table


def paper_table(table: Table) -> RichTable:
    """The table that the paper has, with our figures, for the terminal."""
    header, lines = table
    shown = RichTable(box=box.SIMPLE_HEAD)
    for place, head in enumerate(header):
        shown.add_column(head, justify="right" if place else "left", overflow="fold")
    for line in lines:
        shown.add_row(*(Text(cell) for cell in line))
    return shown


def markdown(judgement: Judgement) -> str:
    """The verdicts as Markdown, with command, hardware and time."""
    parts = [
        f"`{judgement.command}` on {judgement.hardware}: {seconds_text(judgement.seconds)} of training "
        "and computing.",
    ]
    if judgement.note:
        parts.append(judgement.note)
    for file, changes in judgement.changes.items():
        if changes:
            parts.append(f"`{file}.toml` with {', '.join(f'`{change}`' for change in changes)}.")
    lines = [
        [claim.says, claim.paper, claim.ours, f"**{claim.verdict}**", claim.reason]
        for claim in judgement.claims
    ]
    parts.append(_markdown_table(["claim", "paper", "ours", "verdict", "asked for"], lines))
    if judgement.table:
        parts.append(_markdown_table(*judgement.table))
    return "\n\n".join(parts) + "\n"


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [list(header), ["---"] * len(header), *map(list, lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def write_judgement(judgement: Judgement, folder: Path) -> None:
    """``verdict.json`` and ``verdict.md`` in ``folder``."""
    write_json(folder / "verdict.json", dataclasses.asdict(judgement))
    write_atomic(folder / "verdict.md", markdown(judgement).encode())


def read_judgement(folder: Path) -> Judgement | None:
    """What ``write_judgement`` wrote; None if nothing was written yet."""
    file = folder / "verdict.json"
    if not file.exists():
        return None
    content = json.loads(file.read_text())
    claims = [Judged(**{**claim, "verdict": Verdict(claim["verdict"])}) for claim in content.pop("claims")]
    return Judgement(claims=claims, **content)
