"""``holdfast paper``: lists the papers, runs their experiments, and fills the verdicts into a document."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from holdfast.cli.options import print_path
from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json
from holdfast.experiments.record import RunRecord, load_record
from holdfast.experiments.runner import Interrupted, describe_environment
from holdfast.report.figures import save_figure
from holdfast_papers.base import Circumstances, Paper, PaperExperiment, Verdict
from holdfast_papers.catalogue import find_experiments, load_papers
from holdfast_papers.drawing import draw
from holdfast_papers.evidence import Evidence, Scale
from holdfast_papers.execution import PaperProgress, Task, joined, locked
from holdfast_papers.verdicts import (
    Judgement,
    count_text,
    judge,
    markdown,
    markdown_table,
    paper_table,
    read_judgement,
    read_verdicts,
    terminal_table,
    verdict_record,
    write_judgement,
)

PLACE = re.compile(
    r"(<!-- holdfast paper run (\S+) --scale (small|full) -->\n)(.*?)(<!-- end -->)", flags=re.DOTALL
)
COUNTS = re.compile(r"(<!-- holdfast paper counts -->\n)(.*?)(<!-- end -->)", flags=re.DOTALL)


def list_papers(*, as_json: bool = False) -> None:
    """``holdfast paper``"""
    if as_json:
        print(json.dumps([_described(paper) for paper in load_papers().values()], indent=2))
        return
    console = Console()
    for paper in load_papers().values():
        console.print(f"\n[bold underline]{paper.id}[/bold underline]  {paper.title}", highlight=False)
        console.print(Padding(Text(paper.reference, style="dim"), (0, 0, 0, 4)))
        for experiment in paper.experiments:
            words = Text.assemble((experiment.id, "bold cyan"), f"  {experiment.title}")
            words.append(f" ({len(experiment.claims)} claims)", style="dim")
            console.print(Padding(words, (0, 0, 0, 4)), highlight=False)
    console.print("\nRun one with, say: [bold]holdfast paper run local-gecl/table-3[/bold]", highlight=False)


def _described(paper: Paper) -> dict[str, Any]:
    experiments = [
        {"id": one.id, "title": one.title, "claims": [claim.says for claim in one.claims]}
        for one in paper.experiments
    ]
    return {"id": paper.id, "title": paper.title, "reference": paper.reference, "experiments": experiments}


def run_papers(
    wanted: str,
    scale: Scale,
    data_dir: Path | None,
    device: str,
    runs_dir: Path,
    seed: int | None,
    *,
    as_json: bool = False,
) -> None:
    """``holdfast paper run``: exit code 1 if a claim fails, 2 if data are missing."""
    console = Console(stderr=as_json)
    circumstances = Circumstances(scale, device, data_dir)
    chosen = find_experiments(wanted)
    tasks = {
        (paper.id, experiment.id): _tasks(paper, experiment, circumstances, runs_dir, seed)
        for paper, experiment in chosen
    }
    everything = [run for some in tasks.values() for task in some for run in task.runs()]
    _stop_if_data_are_missing([task for task in everything if not task.finished])
    with console.status("checking what is to be run"):
        work = sum(task.check() for task in everything if not task.finished)
    judgements = []
    with ExitStack() as stack:
        progress = PaperProgress(console, work)
        stack.enter_context(progress.bar)
        for paper, experiment in chosen:
            folder = experiment_folder(runs_dir, paper.id, experiment.id, scale)
            mine = tasks[paper.id, experiment.id]
            try:
                if seed is not None:  # judged by the command without it
                    for task in mine:
                        task.execute(progress)
                    continue
                with locked(folder):
                    judgement = _carry_out(paper, experiment, mine, circumstances, folder, progress)
            except Interrupted:
                stack.close()
                print("stopped, all is saved; the same command continues", file=sys.stderr)
                sys.exit(130)
            judgements.append(judgement)
            _show(console, judgement, folder)
    _conclude(console, judgements, as_json)


def judge_finished(
    wanted: str, scale: Scale, data_dir: Path | None, device: str, runs_dir: Path, as_json: bool = False
) -> None:
    """``holdfast paper run --no-run``: judges what is finished, and says how much that is."""
    console = Console(stderr=as_json)
    circumstances = Circumstances(scale, device, data_dir)
    judgements = []
    for paper, experiment in find_experiments(wanted):
        folder = experiment_folder(runs_dir, paper.id, experiment.id, scale)
        tasks = _tasks(paper, experiment, circumstances, runs_dir, None)
        found = [(task, task.finished_part()) for task in tasks]
        records = {task.preset.file: record for task, record in found if record is not None}
        if not records:
            raise HoldfastError(f"{folder} has no finished run of {paper.id}/{experiment.id}")
        jobs = {
            f"`{task.preset.file}`": (len(record.summary["jobs"]) if record else 0, len(task.plan().jobs))
            for task, record in found
        }
        note = ""
        if any(done < planned for done, planned in jobs.values()):
            parts = ", ".join(f"{preset} {done} of {planned}" for preset, (done, planned) in jobs.items())
            note = f"Judged as far as it was run, by jobs: {parts}."
        with locked(folder):
            judgements.append(_judged(paper, experiment, records, circumstances, folder, note))
        _show(console, judgements[-1], folder)
    _conclude(console, judgements, as_json)


def _conclude(console: Console, judgements: Sequence[Judgement], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(judgement) for judgement in judgements], indent=2))
    if len(judgements) > 1:
        console.print(_overview(judgements))
    if any(judgement.count(Verdict.FAIL) for judgement in judgements):
        sys.exit(1)


def experiment_folder(runs_dir: Path, paper: str, experiment: str, scale: str) -> Path:
    """Where the runs, the figure and the verdict of an experiment lie."""
    return runs_dir / "papers" / paper / experiment / scale


def fill_document(document: Path, runs_dir: Path) -> None:
    """``holdfast paper fill``: verdicts and figures of the runs at hand into their places in ``document``."""
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise HoldfastError(f"cannot read {document}: {error.strerror}") from None
    filled, without = [], []
    record = verdict_record(document)
    verdicts = read_verdicts(record)

    def fill(place: re.Match[str]) -> str:
        start, name, scale, before, end = place.groups()
        paper, _, experiment = name.partition("/")
        folder = experiment_folder(runs_dir, paper, experiment, scale)
        judgement = read_judgement(folder)
        if judgement is None:
            without.append(f"{name} --scale {scale}")
            return start + before + end
        filled.append(name)
        verdicts[f"{name} {scale}"] = judgement.shown
        content = markdown(judgement)
        if (folder / "figure.png").exists():
            picture = f"figures/{paper}-{experiment}-{scale}.png"
            (document.parent / "figures").mkdir(exist_ok=True)
            shutil.copyfile(folder / "figure.png", document.parent / picture)
            reduced = ", small scale" if scale == "small" else ""
            content += f"\n![{judgement.title}{reduced}]({picture})\n"
        return f"{start}\n{content}\n{end}"

    text = PLACE.sub(fill, text)
    text, counted = COUNTS.subn(lambda place: f"{place[1]}\n{_counts(document.parent)}\n\n{place[3]}", text)
    if not filled and not without and not counted:
        raise HoldfastError(
            f"{document} has no place for a verdict: expected '<!-- holdfast paper run local-gecl/table-3 "
            "--scale full -->' and, below it, '<!-- end -->'"
        )
    write_atomic(document, text.encode())
    if filled:
        record.parent.mkdir(exist_ok=True)
        write_json(record, verdicts)
    print(f"filled {len(filled)} places in {document}")
    for name in without:
        print(f"left as it was, as {runs_dir} has no such run: {name}")


def _counts(folder: Path) -> str:
    """How many claims hold, by paper and scale, of the verdicts that the documents in ``folder`` show."""
    lines = []
    for paper in load_papers().values():
        page = folder / f"{paper.id}.md"
        shown = read_verdicts(verdict_record(page))
        cells = []
        for scale in ("full", "small"):
            mine = [claims for name, claims in shown.items() if name.endswith(f" {scale}")]
            found = [words for claims in mine for words in claims.values()]
            verdicts = [Verdict(words.partition(" (")[0]) for words in found]
            cells.append(count_text(verdicts) if verdicts else "not run")
        lines.append([f"[{paper.id}]({page.name})", *cells])
    return markdown_table(["paper", "full scale", "small scale"], lines)


def _tasks(
    paper: Paper,
    experiment: PaperExperiment,
    circumstances: Circumstances,
    runs_dir: Path,
    seed: int | None,
) -> list[Task]:
    folder = experiment_folder(runs_dir, paper.id, experiment.id, circumstances.scale)
    return [
        Task(paper, experiment, preset, circumstances, folder / preset.file, seed)
        for preset in experiment.presets
    ]


def _stop_if_data_are_missing(tasks: Sequence[Task]) -> None:
    asked: dict[str, str] = {}  # data set -> the first that wants it
    for task in tasks:
        asked.setdefault(json.dumps(task.raw["problem"]["dataset"], sort_keys=True), task.title)
    first = {task.title: task for task in reversed(tasks)}
    missing = {error: title for title in asked.values() if (error := first[title].missing_data())}
    for error, title in missing.items():
        print(f"error: {title}: {error}", file=sys.stderr)
    if missing:
        sys.exit(2)


def _carry_out(
    paper: Paper,
    experiment: PaperExperiment,
    tasks: Sequence[Task],
    circumstances: Circumstances,
    folder: Path,
    progress: PaperProgress,
) -> Judgement:
    """Runs and computes what is missing, judges it, and writes verdict and figure."""
    records = {
        task.preset.file: joined([load_record(run.execute(progress)) for run in task.runs()])
        for task in tasks
    }
    for record in records.values():
        made_with, given = record.summary.get("data_dir"), circumstances.data_dir
        if given and made_with and Path(made_with) != given.resolve():
            progress.note(f"{record.path} was made with the data in {made_with}; delete it to run it again")
    progress.show(f"{paper.id}/{experiment.id}: computing")
    return _judged(paper, experiment, records, circumstances, folder)


def _judged(
    paper: Paper,
    experiment: PaperExperiment,
    records: Mapping[str, RunRecord],
    circumstances: Circumstances,
    folder: Path,
    missing: str = "",
) -> Judgement:
    """Computes what is to be computed, and writes verdict and figure; ``missing`` says what was not run."""
    rows = []
    start = time.perf_counter()
    if experiment.compute is not None:
        rows = experiment.compute(circumstances)
    seconds = time.perf_counter() - start + sum(map(_training_seconds, records.values()))
    evidence = Evidence(circumstances.scale, records, rows, partial=bool(missing))
    devices = {str(record.summary.get("device", "cpu")) for record in records.values()}
    device = max(devices, default=circumstances.device)  # if some ran on a CPU, others on a GPU: that one
    hardware = _hardware(list(records.values()), circumstances.device)
    judgement = judge(paper, experiment, evidence, hardware, device, seconds)
    judgement = replace(judgement, note=" ".join(filter(None, (judgement.note, missing))))
    write_judgement(judgement, folder)
    if experiment.layout is not None:
        save_figure(draw(experiment.layout, evidence), folder / "figure")
    return judgement


def _training_seconds(record: RunRecord) -> float:
    return sum(job["seconds"] for job in record.summary["jobs"])


def _hardware(records: Sequence[RunRecord], device: str) -> str:
    environments = [record.environment for record in records] or [describe_environment(device, [])]
    names = [str(e["gpu"] or f"{e['threads']} of {e['cores']} CPU cores") for e in environments]
    return " and ".join(dict.fromkeys(names))


def _show(console: Console, judgement: Judgement, folder: Path) -> None:
    console.print(terminal_table(judgement))
    if judgement.table:
        console.print(paper_table(judgement.table))
    console.print(f"on {judgement.circumstances}", highlight=False)
    what = "verdict and figure" if (folder / "figure.png").exists() else "verdict"
    print_path(console, what, folder)


def _overview(judgements: Sequence[Judgement]) -> Text:
    """How many claims hold, of each paper and in all; what does not count is named beside them."""
    words = Text()
    for paper in [*dict.fromkeys(judgement.paper for judgement in judgements), "all"]:
        mine = [judgement for judgement in judgements if paper in (judgement.paper, "all")]
        words.append(f"{paper}: ", style="bold")
        words.append(count_text([claim.verdict for judgement in mine for claim in judgement.claims]) + "\n")
    words.rstrip()
    return words
