"""The command line. Every command imports what it needs, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

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
)

app = typer.Typer(
    name="holdfast",
    help="Federated learning that does not drift. Start with: holdfast run",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.command()
def run(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    runs_dir: Annotated[Path, typer.Option(help="Where the run directory is made.")] = Path("runs"),
    name: Annotated[
        str | None, typer.Option(help="What the run directory is called; by default by experiment and time.")
    ] = None,
    processes: Processes = None,
    tensorboard: TensorBoard = False,
    watch: Watch = False,
    quiet: Quiet = False,
    json: AsJson = False,
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
    from holdfast.cli.run import run_experiment

    path, changes = _split(experiment, overrides)
    run_experiment(
        path,
        changes,
        data_dir,
        device,
        runs_dir,
        name=name,
        tensorboard=tensorboard,
        watch=watch,
        quiet=quiet,
        as_json=json,
    )


@app.command()
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
        from holdfast.core.errors import HoldfastError

        if processes is not None or tensorboard or rounds is not None:
            raise HoldfastError(f"{folder} is a tuning: --rounds, --processes and --tensorboard are for runs")
        return resume_tuning(folder, device, quiet=quiet)
    if processes is not None:
        _start_processes(processes)
    from holdfast.cli.run import resume_run

    return resume_run(folder, device, rounds=rounds, tensorboard=tensorboard, quiet=quiet)


@app.command()
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
    from holdfast.cli.tune import tune_experiment
    from holdfast.experiments.record_files import checked_mode

    path, changes = _split(experiment, overrides)
    tune_experiment(
        path,
        changes,
        data_dir,
        device,
        runs_dir,
        parameter=parameter,
        values=values,
        metric=metric,
        mode=checked_mode(mode),
        widen=widen,
        quiet=quiet,
    )


@app.command()
def audit(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    shadows: Annotated[
        int, typer.Option(min=4, help="Runs on a random half of the data, for membership inference.")
    ] = 16,
    json: AsJson = False,
) -> None:
    """Attack an experiment: what a neighbour, a server and a stranger learn about its samples.

    Tries to rebuild samples from messages and to tell who was in the training data, with and without what
    protects the experiment, and measures epsilon from below where it is private.

    [bold]holdfast audit mine.toml rounds=20 problem.batch_size=1[/bold]
    """
    from holdfast.cli.leakage import audit_experiment

    path, changes = _split(experiment, overrides)
    audit_experiment(path, changes, data_dir, shadows, as_json=json)


@app.command()
def watch(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories, or one rehearsal of a federation."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the page, on 127.0.0.1; 0 is a free one.")
    ] = 0,
    runs_dir: Annotated[
        Path, typer.Option(help="Where the newest run is looked for, if none is named.")
    ] = Path("runs"),
) -> None:
    """Follow a run in the browser: curves, table, network, partition and log, as they grow.

    Prints the address of a page that only this machine can open. The run itself is not touched: it may have
    been started elsewhere, be resumed, or have ended.
    """
    from holdfast.cli.watch import watch_runs

    watch_runs(folders or [], runs_dir, port)


@app.command()
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
    json: AsJson = False,
) -> None:
    """Write the report of a run again, or one report that overlays several runs."""
    from holdfast.cli.run import report_runs

    report_runs(folders, output, as_json=json)


def _kinds() -> list[str]:
    """For completion in a shell."""
    from holdfast.cli.listing import KINDS

    return [*KINDS, "runs"]


@app.command("list")
def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, topologies, datasets, models, partitions ... (all, if left out); or runs.",
            autocompletion=_kinds,
        ),
    ] = None,
    json: AsJson = False,
    runs_dir: Annotated[Path, typer.Option(help="Where 'holdfast list runs' looks.")] = Path("runs"),
) -> None:
    """List what can be chosen in an experiment, with parameters, defaults and one line on each.

    [bold]holdfast list runs[/bold]   the runs made so far, with what became of them
    """
    if kind == "runs":
        from holdfast.cli.runs import list_runs

        return list_runs(runs_dir, as_json=json)
    from holdfast.cli.listing import list_choices

    return list_choices(kind, as_json=json)


@app.command()
def inspect(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")] = Path(
        "inspect"
    ),
    json: AsJson = False,
) -> None:
    """Look before training: who holds which labels, the graph, how fast it mixes, what a run will cost."""
    from holdfast.cli.inspection import inspect_experiment

    path, changes = _split(experiment, overrides)
    inspect_experiment(path, changes, data_dir, device, output, as_json=json)


@app.command()
def recommend(
    experiment: ExperimentPath = None,
    overrides: Overrides = None,
    data_dir: DataDir = None,
    megabytes: Annotated[
        float | None, typer.Option(help="What all nodes together may send in all rounds.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which method, graph and compression to start with on this network, and why; trains nothing."""
    from holdfast.cli.recommend import recommend_experiment

    path, changes = _split(experiment, overrides)
    recommend_experiment(path, changes, data_dir, megabytes=megabytes, as_json=json)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("experiment.toml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write the default experiment, with comments, as a file to start from."""
    from holdfast.cli.run import write_default

    write_default(path, force=force)


new = typer.Typer(help="Lay out something to start from.", no_args_is_help=True)


@new.command()
def project(
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    csv: Annotated[Path | None, typer.Option(help="Your table; without one, made-up payments.")] = None,
    target: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    organisation: Annotated[
        str | None, typer.Option("--node", help="The column with the organisations.")
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Option(help="A column of names or codes, even if they look like numbers; may be repeated."),
    ] = None,
    leave_out: Annotated[
        list[str] | None, typer.Option(help="A column that is not used, such as dates; may be repeated.")
    ] = None,
    fill: Annotated[
        bool, typer.Option("--fill", help='Fill gaps: numbers by the median, words by "unknown".')
    ] = False,
) -> None:
    """Lay out a project of your own: an experiment, a model, a test, and a table in two parts.

    [bold]holdfast new project fraud --csv payments.csv --target fraud --node bank[/bold]
    """
    from holdfast.cli.project import new_project
    from holdfast.cli.project_table import Wishes

    new_project(folder, csv, target, organisation, Wishes(words or (), leave_out or (), fill))


app.add_typer(new, name="new")

PACKAGES = {  # what is missing where their commands are asked for
    "deploy": (("node", "server", "federation"), "federations are a package of their own"),
    "papers": (("paper",), "the papers are a package of their own"),
}


def _add_installed_commands() -> None:
    """Adds the commands of other packages: functions in the entry point group ``holdfast.commands``."""
    installed = {point.name: point for point in entry_points(group="holdfast.commands")}
    for _, point in sorted(installed.items()):
        point.load()(app)
    for package in PACKAGES.keys() - installed.keys():
        commands, why = PACKAGES[package]
        for name in commands:
            context = {"ignore_unknown_options": True, "allow_extra_args": True}
            app.command(name, hidden=True, context_settings=context)(_missing(package, why))


def _missing(package: str, why: str) -> Callable[[], None]:
    """A command that says which package has it."""

    def command() -> None:
        from holdfast.core.errors import HoldfastError

        raise HoldfastError(f"{why}: pip install ./{package} in a clone of holdfast")

    return command


_add_installed_commands()


def _version(wanted: bool) -> None:
    if wanted:
        import holdfast

        typer.echo(f"holdfast {holdfast.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


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


def _split(experiment: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """``holdfast run key=value`` has no file: its first argument is already an override."""
    changes = list(overrides or [])
    if experiment is not None and "=" in str(experiment) and not experiment.exists():
        return None, [str(experiment), *changes]
    return experiment, changes


def main() -> None:
    """Runs the command line; what the user or the machine is to blame for is one line and an exit code."""
    from holdfast.core.errors import HoldfastError

    try:
        app(prog_name="holdfast")
    except (HoldfastError, OSError, MemoryError) as error:
        typer.echo(f"error: {error or 'out of memory'}", err=True)
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
