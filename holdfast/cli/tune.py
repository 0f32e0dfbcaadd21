"""``holdfast tune``, and ``holdfast resume`` of a tuning."""

from __future__ import annotations

import csv
import io
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import (
    DataDir,
    Device,
    ExperimentPath,
    Overrides,
    Quiet,
    print_path,
    split_overrides,
)
from holdfast.core.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.experiments.plan import Plan
    from holdfast.experiments.tuning import Goal, Grids, Tuned


def tune(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    parameter: Annotated[str, typer.Option(help="The hyperparameter, a positive number.")] = "lr",
    values: Annotated[
        str | None,
        typer.Option(help="The first values, such as 0.01,0.1,1; by default 1/4 to 4 times the present one."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="What is compared; by default test_accuracy, else train_loss.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="max or min; known for the metrics that holdfast lists.")
    ] = None,
    widen: Annotated[
        int, typer.Option(min=0, help="How often at most a value is added beyond the edge of the grid.")
    ] = 4,
    data_dir: DataDir = None,
    device: Device = "cpu",
    runs_dir: Annotated[Path, typer.Option(help="Where the folder is made.")] = Path("runs"),
    quiet: Quiet = False,
) -> None:
    """Find the best step size of every algorithm, on a grid that widens while the best lies on its edge.

    Values that diverge count as worst. Ctrl-C saves and stops; [bold]holdfast resume[/bold] continues.

    [bold]holdfast tune mine.toml --values 0.01,0.1,1 seeds=[0,1,2][/bold]
    """
    from holdfast.core.precision import switches_restored
    from holdfast.experiments.record_files import checked_mode
    from holdfast.experiments.runner import new_folder
    from holdfast.experiments.spec import read_experiment
    from holdfast.experiments.tuning import chosen_goal, open_folder

    path, changes = split_overrides(experiment, overrides)
    mode = checked_mode(mode)
    raw = read_experiment(path, changes)
    grids = {_label(entry): _grid(entry, parameter, values) for entry in raw["algorithm"]}
    plan = _plan(raw, grids, parameter, data_dir, device)
    goal = chosen_goal(parameter, metric, mode, widen, plan)
    for warning in plan.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    folder = new_folder(runs_dir, f"{plan.name}-tune")
    where = {"data_dir": None if data_dir is None else str(data_dir.resolve()), "device": device}
    notes = {"parameter": parameter, "metric": goal.metric, "mode": goal.mode, "widen": widen}
    open_folder(folder, {**notes, "grids": grids, "experiment": raw, **where}, resume=False)
    with switches_restored():
        _run(folder, goal, grids, raw, data_dir, device, quiet=quiet)


def resume_tuning(folder: Path, device: str | None, *, quiet: bool) -> None:
    """``holdfast resume`` of a tuning."""
    from holdfast.core.precision import switches_restored
    from holdfast.experiments.tuning import Goal, read_notes

    notes = read_notes(folder)
    if "origin" in notes:
        raise HoldfastError(
            f"{folder} is a tuning from Python: continue by calling {notes['origin']} with "
            f"run_dir={str(folder)!r} and resume=True"
        )
    goal = Goal(notes["parameter"], notes["metric"], notes["mode"], notes["widen"])
    data_dir = Path(notes["data_dir"]) if notes["data_dir"] else None
    grids, raw, device = notes["grids"], notes["experiment"], device or notes["device"]
    with switches_restored():
        _run(folder, goal, grids, raw, data_dir, device, quiet=quiet)


def _run(
    folder: Path,
    goal: Goal,
    grids: Grids,
    raw: dict[str, Any],
    data_dir: Path | None,
    device: str,
    *,
    quiet: bool,
) -> None:
    from rich.console import Console

    from holdfast.engines.cluster.launch import INTERRUPTED
    from holdfast.experiments.callbacks import Callback
    from holdfast.experiments.execution import stop_signals
    from holdfast.experiments.runner import Interrupted
    from holdfast.experiments.tuning import tune as run_tuning
    from holdfast.report.progress import Progress, run_watched

    console = Console(quiet=quiet)
    print_path(console, "tuning", folder)
    watching: list[Callback] = [] if quiet else [Progress(console=console, leave=False)]

    def make_plan(wanted: Grids) -> Plan:
        return _plan(raw, wanted, goal.parameter, data_dir, device)

    try:
        with stop_signals(signal.SIGINT, signal.SIGTERM) as asked:
            tuned = run_tuning(goal, grids, make_plan, folder, run_watched(watching, asked))
    except Interrupted:
        command = f"holdfast resume {shlex.quote(str(folder))}"
        print(f"stopped, all is saved; continue with: {command}", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
    _show(tuned, folder, console)
    if quiet:
        print(folder)
    if not any(tuned.best(name) for name in tuned.algorithms):
        sys.exit(1)


def _show(tuned: Tuned, folder: Path, console: Console) -> None:
    """Writes the figure and the trials, and prints what was found."""
    from holdfast.core.files import write_atomic
    from holdfast.report.figures import save_figure
    from holdfast.report.tuning import tuning_figure, tuning_table

    save_figure(tuning_figure(tuned), folder / "tuning")
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["algorithm", tuned.goal.parameter, tuned.goal.metric, "std", "note"])
    for trial in sorted(tuned.trials):
        score = ["", ""] if trial.score is None else [trial.score.mean, trial.score.std]
        lines.writerow([trial.algorithm, trial.value, *score, trial.note])
    write_atomic(folder / "trials.csv", text.getvalue().encode())
    console.print(tuning_table(tuned))
    found = {name: tuned.best(name) for name in tuned.algorithms}
    best = [f"algorithm.{name}.{tuned.goal.parameter}={t.value:g}" for name, t in found.items() if t]
    if best:
        console.print("the best values, for holdfast run:", " ".join(best), highlight=False, soft_wrap=True)
    print_path(console, "figure", folder / "tuning.png")


def _plan(raw: dict[str, Any], grids: Grids, parameter: str, data_dir: Path | None, device: str) -> Plan:
    """A sweep over the grids, checked."""
    from holdfast.experiments.plan import Plan
    from holdfast.experiments.tuning import axis_of

    entries = [
        {**entry, parameter: list(grids[_label(entry)])}
        for entry in raw["algorithm"]
        if _label(entry) in grids
    ]
    plan = Plan({**raw, "algorithm": entries}, data_dir, device)
    if others := [axis for axis in plan.axes if axis != axis_of(parameter)]:
        raise HoldfastError(f"{others[0]}: a tuning sweeps over {parameter} alone; give it one value")
    plan.check()
    return plan


def _label(entry: dict[str, Any]) -> str:
    return str(entry.get("label") or entry["name"])


def _grid(entry: dict[str, Any], parameter: str, text: str | None) -> list[float]:
    """The first values of one algorithm: those given, a list in the experiment, or around its value."""
    from holdfast.algorithms.load import algorithm_class
    from holdfast.experiments.tuning import first_grid, takes_whole_numbers

    whole = takes_whole_numbers(algorithm_class(entry["name"]), parameter)
    present = entry.get(parameter)
    values: Sequence[float] | None = present if isinstance(present, list) else None
    if text is not None:
        try:
            values = [int(part) if whole else float(part) for part in text.split(",")]
        except ValueError:
            raise HoldfastError(f"values: expected numbers such as 0.01,0.1,1, got {text!r}") from None
    return first_grid(f"{_label(entry)}: values", values, present, whole=whole)
