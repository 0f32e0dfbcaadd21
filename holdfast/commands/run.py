"""``holdfast run``, ``resume``, ``report`` and ``init``."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.errors import HoldfastError
from holdfast.files import write_atomic
from holdfast.report.html import write_plots, write_report
from holdfast.report.terminal import summary_table
from holdfast.runs.config import default_experiment, read_experiment
from holdfast.runs.plan import Plan
from holdfast.runs.progress import LiveView
from holdfast.runs.record import load_record
from holdfast.runs.runner import Interrupted, Runner, View
from holdfast.runs.tensorboard import TensorBoardView, summary_writer


def run_experiment(
    path: Path | None,
    overrides: list[str],
    data_dir: Path | None,
    device: str,
    runs_dir: Path,
    *,
    tensorboard: bool,
    quiet: bool,
) -> None:
    """``holdfast run``"""
    plan = Plan(read_experiment(path, overrides), data_dir, device)
    plan.check()
    if tensorboard:
        summary_writer()  # complains before there is a run directory
    _carry_out(Runner.start(plan, runs_dir), tensorboard=tensorboard, quiet=quiet)


def resume_run(folder: Path, device: str | None, *, tensorboard: bool, quiet: bool) -> None:
    """``holdfast resume``"""
    record = load_record(folder)
    kept = record.summary.get("data_dir")
    data_dir = Path(str(kept)) if kept else None
    raw = read_experiment(folder / "experiment.toml", [])
    plan = Plan(raw, data_dir, device or str(record.summary.get("device", "cpu")))
    plan.check()
    _carry_out(Runner.reopen(plan, folder), tensorboard=tensorboard, quiet=quiet)


def _carry_out(runner: Runner, *, tensorboard: bool, quiet: bool) -> None:
    """Runs what is left to run, then writes plots and report."""
    console = Console(quiet=quiet)
    print_path(console, "run directory", runner.folder)
    for warning in runner.plan.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    with ExitStack() as stack:
        views: list[View] = [TensorBoardView(runner.folder)] if tensorboard else []
        if not quiet:
            views.append(stack.enter_context(LiveView(runner.plan, console)))
        try:
            runner.execute(views)
        except Interrupted:
            stack.close()
            command = f"holdfast resume {shlex.quote(str(runner.folder))}"
            print(f"stopped, all is saved; continue with: {command}", file=sys.stderr)
            sys.exit(130)
    record = load_record(runner.folder)
    with console.status("writing plots and report"):
        write_plots(record, runner.folder / "plots")
        write_report([record], runner.folder / "report.html")
    console.print(summary_table([record], console.width))
    for job, entry in zip(runner.plan.jobs, runner.summary["jobs"], strict=True):
        if entry["status"] == "diverged":
            console.print(Text.assemble((f"{job.title} diverged", "red"), f": {entry['message']}"))
    print_path(console, "report", runner.folder / "report.html")
    if quiet:
        print(runner.folder)
    if all(entry["status"] == "diverged" for entry in runner.summary["jobs"]):
        sys.exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """``what: path``, the path in one piece however narrow the terminal."""
    console.print(Text.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)


def report_runs(folders: list[Path], output: Path | None) -> None:
    """``holdfast report``"""
    records = [load_record(folder) for folder in folders]
    for record in records:
        write_plots(record, record.path / "plots")
    target = output or records[0].path / ("report.html" if len(records) == 1 else "comparison.html")
    write_report(records, target)
    console = Console()
    console.print(summary_table(records, console.width))
    print_path(console, "report", target)


def write_default(path: Path, *, force: bool) -> None:
    """``holdfast init``"""
    if path.exists() and not force:
        raise HoldfastError(f"{path} exists already; choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise HoldfastError(f"{path.parent} is not a folder")
    write_atomic(path, default_experiment().encode())
    print(f"wrote {path}; run it with: holdfast run {path}")
