"""The command line.

A command is one function, with its options, in the module that implements it. It imports what it needs when
it is called: the modules of commands import nothing heavy, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from holdfast.cli import inspect, leakage, listing, project, recommend, run, tune, watch
from holdfast.core.errors import HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Federated learning that does not drift. Start with: holdfast run",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "resume": run.resume,
    "tune": tune.tune,
    "audit": leakage.audit,
    "watch": watch.watch,
    "report": run.report,
    "list": listing.list_,
    "inspect": inspect.inspect,
    "recommend": recommend.recommend,
    "init": run.init,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
new = typer.Typer(help="Lay out something to start from.", no_args_is_help=True)
new.command()(project.project)
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


def main() -> None:
    """Runs the command line; what the user or the machine is to blame for is one line and an exit code."""
    try:
        app(prog_name="holdfast")
    except (HoldfastError, OSError, MemoryError) as error:
        typer.echo(f"error: {error or 'out of memory'}", err=True)
        sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
