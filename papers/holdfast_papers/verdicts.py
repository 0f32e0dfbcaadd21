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

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json
from holdfast.report.format import seconds_text
from holdfast_papers.base import (
    WORDS,
    Claim,
    Finding,
    Paper,
    PaperExperiment,
    Table,
    Verdict,
    not_comparable,
)
from holdfast_papers.evidence import Evidence, MissingRunError, Scale

Shown = dict[str, str]  # what a claim says -> its verdict, and in parentheses how sure that is
COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red"}  # what does not count is yellow


@dataclass(frozen=True)
class Judged:
    """A claim with what was found."""

    says: str
    paper: str
    ours: str
    verdict: Verdict
    reason: str
    sure: str = ""

    @property
    def markdown(self) -> str:
        """The verdict and how sure it is."""
        return f"**{self.verdict}**{self.sure and f' ({self.sure})'}"


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
    device: str = "cpu"
    seeds: Sequence[int] = ()  # how many the runs have, the fewest and the most; none if nothing was run

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.experiment}"

    @property
    def command(self) -> str:
        device = f" --device {self.device}" if self.device != "cpu" else ""
        return f"holdfast paper run {self.name} --scale {self.scale}{device}"

    @property
    def circumstances(self) -> str:
        """Hardware, time and seeds in words."""
        counts = " to ".join(map(str, self.seeds))
        seeds = {"": "", "1": "one seed"}.get(counts, f"{counts} seeds")
        took = f"{seconds_text(self.seconds)} of training and computing"
        return f"{self.hardware}: {', '.join(filter(None, (took, seeds)))}"

    @property
    def shown(self) -> Shown:
        """The verdicts for ``verdicts/<paper>.json``."""
        return {claim.says: f"{claim.verdict}{claim.sure and f' ({claim.sure})'}" for claim in self.claims}

    def count(self, verdict: Verdict) -> int:
        return sum(claim.verdict == verdict for claim in self.claims)


def judge(
    paper: Paper, experiment: PaperExperiment, evidence: Evidence, hardware: str, device: str, seconds: float
) -> Judgement:
    """Asks every claim of ``experiment``."""
    scale = evidence.scale
    changes = {preset.file: list(preset.small) for preset in experiment.presets if scale == "small"}
    seeds = [len({job["seed"] for job in record.summary["jobs"]}) for record in evidence.runs.values()]
    return Judgement(
        paper=paper.id,
        experiment=experiment.id,
        title=experiment.title,
        scale=scale,
        claims=[_judged(claim, evidence) for claim in experiment.claims],
        changes=changes,
        table=_table(experiment, evidence),
        note=experiment.note,
        hardware=hardware,
        device=device,
        seeds=sorted({min(seeds), max(seeds)}) if seeds else [],
        seconds=seconds,
    )


def _table(experiment: PaperExperiment, evidence: Evidence) -> Table | None:
    try:
        return experiment.table(evidence) if experiment.table else None
    except HoldfastError as error:
        return ["no table"], [[str(error)]]


def _judged(claim: Claim, evidence: Evidence) -> Judged:
    try:
        finding = claim.check(evidence)
    except MissingRunError:
        finding = not_comparable("–", "what it needs was not run to its end")
    except HoldfastError as error:  # such as a curve that diverged: the claim was not shown
        finding = Finding(Verdict.FAIL, "–", f"cannot be judged: {error}")
    verdict = WORDS.get((claim.kind, finding.verdict), finding.verdict)
    return Judged(claim.says, claim.paper, finding.ours, verdict, finding.reason, finding.sure)


def count_text(verdicts: Sequence[Verdict]) -> str:
    """Such as ``7 of 9 claims hold; not counted: 1 NOT COMPARABLE, 2 ERRATUM``."""
    passed, failed = verdicts.count(Verdict.PASS), verdicts.count(Verdict.FAIL)
    others = [v for v in Verdict if v in verdicts and v not in (Verdict.PASS, Verdict.FAIL)]
    aside = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in others)
    return f"{passed} of {passed + failed} claims hold{aside and f'; not counted: {aside}'}"


def terminal_table(judgement: Judgement) -> RichTable:
    """The verdicts for the terminal."""
    table = RichTable(title=f"{judgement.name} ({judgement.scale}): {judgement.title}", box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    for head, ratio in (("claim", 5), ("paper", 2), ("ours", 3), ("verdict", None), ("asked for", 3)):
        table.add_column(head, ratio=ratio, overflow="fold", min_width=10 if ratio is None else None)
    for claim in judgement.claims:
        verdict = Text(claim.verdict, style=f"bold {COLOURS.get(claim.verdict, 'yellow')}")
        verdict.append(claim.sure and f"\n{claim.sure}")
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
        f"`{judgement.command}` on {judgement.circumstances}.",
    ]
    if judgement.note:
        parts.append(judgement.note)
    for file, changes in judgement.changes.items():
        if changes:
            parts.append(f"`{file}.toml` with {', '.join(f'`{change}`' for change in changes)}.")
    lines = [
        [claim.says, claim.paper, claim.ours, claim.markdown, claim.reason] for claim in judgement.claims
    ]
    parts.append(markdown_table(["claim", "paper", "ours", "verdict", "asked for"], lines))
    if judgement.table:
        parts.append(markdown_table(*judgement.table))
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [list(header), ["---"] * len(header), *map(list, lines)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def write_judgement(judgement: Judgement, folder: Path) -> None:
    """``verdict.json`` and ``verdict.md`` in ``folder``."""
    write_json(folder / "verdict.json", dataclasses.asdict(judgement))
    write_atomic(folder / "verdict.md", markdown(judgement).encode())


def verdict_record(document: Path) -> Path:
    """Where the verdicts that ``document`` shows are kept for programs."""
    return document.parent / "verdicts" / f"{document.stem}.json"


def read_verdicts(file: Path) -> dict[str, Shown]:
    """The verdicts of experiments, by name and scale such as ``local-gecl/table-3 small``."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def read_judgement(folder: Path) -> Judgement | None:
    """What ``write_judgement`` wrote; None if nothing was written yet."""
    file = folder / "verdict.json"
    if not file.exists():
        return None
    content = json.loads(file.read_text())
    claims = [Judged(**{**claim, "verdict": Verdict(claim["verdict"])}) for claim in content.pop("claims")]
    return Judgement(claims=claims, **content)
