"""``holdfast run``, ``resume``, ``report`` and ``init``."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.report.html import write_plots, write_report
from holdfast.report.terminal import summary_table
from holdfast.runs.config import default_experiment, read_experiment
from holdfast.runs.files import write_atomic
from holdfast.runs.plan import Plan
from holdfast.runs.progress import LiveView
from holdfast.runs.record import load_record
from holdfast.runs.runner import Interrupted, Runner, View
from holdfast.runs.tensorboard import TensorBoardView


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
    console.print(f"run directory: [bold]{runner.folder}[/bold]")
    with ExitStack() as stack:
        views: list[View] = [TensorBoardView(runner.folder)] if tensorboard else []
        if not quiet:
            views.append(stack.enter_context(LiveView(runner.plan, console)))
        try:
            runner.execute(views)
        except Interrupted:
            stack.close()
            print(f"stopped, all is saved; continue with: holdfast resume {runner.folder}", file=sys.stderr)
            sys.exit(130)
    record = load_record(runner.folder)
    write_plots(record, runner.folder / "plots")
    write_report([record], runner.folder / "report.html")
    console.print(summary_table([record], console.width))
    for job in record.summary["jobs"]:
        if job["status"] == "diverged":
            console.print(f"[red]{job['algorithm']}, seed {job['seed']}, diverged[/red]: {job['message']}")
    console.print(f"report: [bold]{runner.folder / 'report.html'}[/bold]")
    if quiet:
        print(runner.folder)
    if all(job["status"] == "diverged" for job in record.summary["jobs"]):
        sys.exit(1)


def report_runs(folders: list[Path], output: Path | None) -> None:
    """``holdfast report``"""
    records = [load_record(folder) for folder in folders]
    for record in records:
        write_plots(record, record.path / "plots")
    target = output or records[0].path / ("report.html" if len(records) == 1 else "comparison.html")
    write_report(records, target)
    console = Console()
    console.print(summary_table(records, console.width))
    console.print(f"report: [bold]{target}[/bold]")


def write_default(path: Path, *, force: bool) -> None:
    """``holdfast init``"""
    if path.exists() and not force:
        raise HoldfastError(f"{path} exists already; choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise HoldfastError(f"{path.parent} is not a folder")
    write_atomic(path, default_experiment().encode())
    print(f"wrote {path}; run it with: holdfast run {path}")
