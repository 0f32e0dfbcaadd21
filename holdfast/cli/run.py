"""``holdfast run``, ``resume``, ``report`` and ``init``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import holdfast
from holdfast.cli.options import (
    AsJson,
    DataDir,
    Device,
    ExperimentPath,
    Overrides,
    Processes,
    Quiet,
    TensorBoard,
    Watch,
    print_path,
    split_overrides,
)
from holdfast.cli.watch import live_page
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.core.world import World
    from holdfast.experiments.plan import Plan
    from holdfast.experiments.runner import Runner


def run(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    runs_dir: Annotated[Path, typer.Option(help="Where the run directory is made.")] = Path("runs"),
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the run directory; by default made of the experiment's name and the time."
        ),
    ] = None,
    processes: Processes = None,
    tensorboard: TensorBoard = False,
    watch: Watch = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: train every algorithm on the same problem, then compare them.

    Without a file this is the default experiment: ten nodes on a ring, handwritten digits, three algorithms.
    Results go to a new folder under runs/, with metrics.csv, plots, models and a self-contained report.html.
    Ctrl-C saves and stops; [bold]holdfast resume[/bold] continues.

    [bold]holdfast run network.topology=complete rounds=50[/bold]   change values

    [bold]holdfast run mine.toml algorithm.lr=[0.1,0.01] seeds=[0,1,2][/bold]   sweep, over three seeds
    """
    if processes is not None:
        _start_processes(processes)
    from holdfast.core.precision import switches_restored
    from holdfast.engines.cluster.launch import launch_id, run_to_continue
    from holdfast.engines.cluster.ranks import joined
    from holdfast.experiments.plan import Plan
    from holdfast.experiments.runner import Runner
    from holdfast.experiments.spec import read_experiment
    from holdfast.experiments.trackers import summary_writer

    path, changes = split_overrides(experiment, overrides)
    with switches_restored():
        with joined() as world:
            own_device = world.own_device(device)
            plan = _agreed_plan(
                world, lambda: Plan(read_experiment(path, changes), data_dir, own_device, world)
            )
            if tensorboard:
                world.raise_on_all(summary_writer)  # complains before there is a run directory
            launch = launch_id()
            before = world.text_of_leader(lambda: str(run_to_continue(runs_dir, launch, plan.digest) or ""))
            runner = (
                Runner.reopen(plan, Path(before)) if before else Runner.start(plan, runs_dir, launch, name)
            )
            _execute(runner, tensorboard=tensorboard, watch=watch, quiet=quiet or as_json)
        _show(runner, quiet=quiet or as_json, as_json=as_json)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run directory.")],
    rounds: Annotated[
        int | None, typer.Option(help="More rounds than the run began with, also of one that is finished.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Another device than the run began on.")] = None,
    processes: Processes = None,
    tensorboard: TensorBoard = False,
    quiet: Quiet = False,
) -> None:
    """Continue a run or a tuning that was interrupted, as if nothing had happened; or extend a run."""
    if (folder / "tuning.json").is_file():
        from holdfast.cli.tune import resume_tuning

        if processes is not None or tensorboard or rounds is not None:
            raise HoldfastError(f"{folder} is a tuning: --rounds, --processes and --tensorboard are for runs")
        return resume_tuning(folder, device, quiet=quiet)
    if processes is not None:
        _start_processes(processes)
    from holdfast.core.precision import switches_restored
    from holdfast.engines.cluster.ranks import joined
    from holdfast.experiments.plan import Plan
    from holdfast.experiments.record import load_record
    from holdfast.experiments.record_files import status_counts
    from holdfast.experiments.runner import Runner
    from holdfast.experiments.spec import read_experiment

    with switches_restored():
        with joined() as world:
            summary = world.raise_on_all(lambda: load_record(folder)).summary
            if "origin" in summary:
                raise HoldfastError(
                    f"{folder} is a run from Python: continue by calling {summary['origin']} with "
                    f"run_dir={str(folder)!r} and resume=True"
                )
            kept = summary.get("data_dir")
            data_dir = Path(str(kept)) if kept else None
            own_device = world.own_device(device or str(summary.get("device", "cpu")))
            toml, more = folder / "experiment.toml", [] if rounds is None else [f"rounds={rounds}"]
            plan = _agreed_plan(world, lambda: Plan(read_experiment(toml, more), data_dir, own_device, world))
            runner = Runner.reopen(plan, folder, extend=True)
            if world.leads and not quiet:
                print(f"so far: {status_counts(runner.summary['jobs'])}; only what is left is run")
            _execute(runner, tensorboard=tensorboard, quiet=quiet)
        return _show(runner, quiet=quiet)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN", help="One or more run directories.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The HTML file; by default report.html (comparison.html, for several) in the first RUN.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run again, or one report that overlays several runs."""
    import json

    from rich.console import Console
    from rich.text import Text

    from holdfast.experiments.record import load_record, overlaid
    from holdfast.experiments.tuning import FILE as TUNING
    from holdfast.report.html import write_plots, write_report
    from holdfast.report.terminal import as_data, summary_table
    from holdfast.report.verdict import differences, job_troubles

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


def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("experiment.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write the default experiment, with comments, as a file to start from."""
    from holdfast.core.files import write_atomic
    from holdfast.experiments.spec import default_experiment

    if path.exists() and not force:
        raise HoldfastError(f"{path} exists already; choose another name, or overwrite it with --force")
    if not path.parent.is_dir():
        raise HoldfastError(f"{path.parent} is not a folder")
    write_atomic(path, default_experiment().encode())
    print(f"wrote {path}; run it with: holdfast run {path}")


def _start_processes(processes: int) -> None:
    """Has this very command run by several processes, and leaves with their exit code."""
    from holdfast.engines.cluster.launch import start_processes

    given = iter(sys.argv[1:])
    rest: list[str] = []
    for argument in given:
        if argument == "--processes":
            next(given)
        elif not argument.startswith("--processes="):
            rest.append(argument)
    raise typer.Exit(start_processes(processes, rest))


def _agreed_plan(world: World, make: Callable[[], Plan]) -> Plan:
    """The checked plan, the same on all ranks."""
    world.agree("version of holdfast", holdfast.__version__, "install the same on all machines")
    plan = world.raise_on_all(make)
    world.agree("experiment", plan.digest, "give all ranks the same file and the same changes")
    plan.check()
    return plan


def _execute(runner: Runner, *, tensorboard: bool, watch: bool = False, quiet: bool) -> None:
    """Runs what is left to run; only the leader of several processes shows anything."""
    from rich.console import Console

    from holdfast.engines.cluster.launch import INTERRUPTED
    from holdfast.experiments.callbacks import Callback
    from holdfast.experiments.runner import Interrupted
    from holdfast.experiments.trackers import TensorBoard
    from holdfast.report.progress import Progress

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
    import json

    from rich.console import Console
    from rich.text import Text

    from holdfast.experiments.record import load_record
    from holdfast.report.html import write_report
    from holdfast.report.terminal import as_data, summary_table
    from holdfast.report.verdict import job_troubles

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
