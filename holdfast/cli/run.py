"""``holdfast run``, ``resume``, ``report`` and ``init``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.text import Text

import holdfast
from holdfast.cli.watch import live_page
from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.core.precision import switches_restored
from holdfast.core.world import World
from holdfast.engines.cluster.launch import INTERRUPTED, launch_id, run_to_continue
from holdfast.engines.cluster.ranks import joined
from holdfast.experiments.callbacks import Callback
from holdfast.experiments.plan import Plan
from holdfast.experiments.record import load_record, overlaid
from holdfast.experiments.record_files import status_counts
from holdfast.experiments.runner import Interrupted, Runner
from holdfast.experiments.spec import default_experiment, read_experiment
from holdfast.experiments.trackers import TensorBoard, summary_writer
from holdfast.experiments.tuning import FILE as TUNING
from holdfast.report.html import write_plots, write_report
from holdfast.report.progress import Progress
from holdfast.report.terminal import as_data, summary_table
from holdfast.report.verdict import differences, job_troubles


@switches_restored()
def run_experiment(
    path: Path | None,
    overrides: list[str],
    data_dir: Path | None,
    device: str,
    runs_dir: Path,
    *,
    name: str | None = None,
    tensorboard: bool,
    watch: bool = False,
    quiet: bool,
    as_json: bool = False,
) -> None:
    """``holdfast run``"""
    quiet = quiet or as_json
    with joined() as world:
        own_device = world.own_device(device)
        plan = _agreed_plan(
            world, lambda: Plan(read_experiment(path, overrides), data_dir, own_device, world)
        )
        if tensorboard:
            world.raise_on_all(summary_writer)  # complains before there is a run directory
        launch = launch_id()
        before = world.text_of_leader(lambda: str(run_to_continue(runs_dir, launch, plan.digest) or ""))
        runner = Runner.reopen(plan, Path(before)) if before else Runner.start(plan, runs_dir, launch, name)
        _execute(runner, tensorboard=tensorboard, watch=watch, quiet=quiet)
    _show(runner, quiet=quiet, as_json=as_json)


@switches_restored()
def resume_run(
    folder: Path, device: str | None, *, rounds: int | None = None, tensorboard: bool, quiet: bool
) -> None:
    """``holdfast resume``"""
    with joined() as world:
        summary = world.raise_on_all(lambda: load_record(folder)).summary
        if "origin" in summary:
            raise HoldfastError(
                f"{folder} is a run from Python: go on by calling {summary['origin']} with "
                f"run_dir={str(folder)!r} and resume=True"
            )
        kept = summary.get("data_dir")
        data_dir = Path(str(kept)) if kept else None
        own_device = world.own_device(device or str(summary.get("device", "cpu")))
        toml = folder / "experiment.toml"
        more = [] if rounds is None else [f"rounds={rounds}"]
        plan = _agreed_plan(world, lambda: Plan(read_experiment(toml, more), data_dir, own_device, world))
        runner = Runner.reopen(plan, folder, extend=True)
        if world.leads and not quiet:
            print(f"so far: {status_counts(runner.summary['jobs'])}; only what is left is run")
        _execute(runner, tensorboard=tensorboard, quiet=quiet)
    _show(runner, quiet=quiet)


def _agreed_plan(world: World, make: Callable[[], Plan]) -> Plan:
    """The checked plan, the same on all ranks."""
    world.agree("version of holdfast", holdfast.__version__, "install the same on all machines")
    plan = world.raise_on_all(make)
    world.agree("experiment", plan.digest, "give all ranks the same file and the same changes")
    plan.check()
    return plan


def _execute(runner: Runner, *, tensorboard: bool, watch: bool = False, quiet: bool) -> None:
    """Runs what is left to run; only the leader of several processes shows anything."""
    leads = runner.world.leads
    console = Console(quiet=quiet or not leads)
    print_path(console, "run directory", runner.folder)
    warnings = runner.plan.warnings()
    for warning in warnings if leads else []:
        print(f"warning: {warning}", file=sys.stderr)
    callbacks: list[Callback] = []
    if tensorboard and leads:
        callbacks.append(TensorBoard(runner.folder / "tensorboard"))
    if not quiet and leads:
        callbacks.append(Progress([job.info for job in runner.plan.jobs], console, leave=False))
    page = live_page([runner.folder], Console(stderr=quiet)) if watch and leads else nullcontext()
    try:
        with page:
            runner.execute(callbacks)
    except Interrupted:
        if leads:
            command = f"holdfast resume {shlex.quote(str(runner.folder))}"
            print(f"stopped, all is saved; continue with: {command}", file=sys.stderr, flush=True)
        runner.world.wait()
        sys.exit(INTERRUPTED)


def _show(runner: Runner, *, quiet: bool, as_json: bool = False) -> None:
    """Writes plots and report, and prints the figures."""
    if not runner.world.leads:
        return
    console = Console(quiet=quiet)
    record = load_record(runner.folder)
    with console.status("writing plots and report"):
        write_report([record], runner.folder / "report.html", plots=runner.folder / "plots")
    console.print(summary_table([record], console.width))
    for trouble in job_troubles(record):
        console.print(Text(trouble, "red"))
    print_path(console, "report", runner.folder / "report.html")
    if as_json:
        print(json.dumps(as_data([record])[0] | {"report": str(runner.folder / "report.html")}, indent=2))
    elif quiet:
        print(runner.folder)
    statuses = [job["status"] for job in record.summary["jobs"]]
    if "failed" in statuses or not {"done", "stopped"} & set(statuses):
        sys.exit(1)


def print_path(console: Console, what: str, path: Path) -> None:
    """``what: path``, the path in one piece however narrow the terminal."""
    console.print(Text.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)


def report_runs(folders: list[Path], output: Path | None, *, as_json: bool = False) -> None:
    """``holdfast report``"""
    tuned = [folder for folder in folders if (folder / TUNING).is_file()]
    grids = {folder: sorted(folder.glob("grid-*")) for folder in tuned}  # a tuning is several runs
    records = [load_record(run) for folder in folders for run in grids.get(folder, [folder])]
    target = output or folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    alone = records[0].path / "plots" if len(records) == 1 else None
    for record in records if alone is None else []:
        write_plots(record, record.path / "plots")
    write_report(records, target, plots=alone)
    for warning in differences(records):
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps({"report": str(target), "runs": as_data(records)}, indent=2))
        return
    console = Console()
    console.print(summary_table(records, console.width))
    for record in overlaid(records):
        for trouble in job_troubles(record):
            console.print(Text(trouble, "red"))
    print_path(console, "report", target)


def write_default(path: Path, *, force: bool) -> None:
    """``holdfast init``"""
    if path.exists() and not force:
        raise HoldfastError(f"{path} exists already; choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise HoldfastError(f"{path.parent} is not a folder")
    write_atomic(path, default_experiment().encode())
    print(f"wrote {path}; run it with: holdfast run {path}")
