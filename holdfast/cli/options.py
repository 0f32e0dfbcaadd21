"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

ExperimentPath = Annotated[
    Path | None,
    typer.Argument(
        metavar="EXPERIMENT.toml", help="The experiment file; without one, the default experiment."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="key.path=value",
        help="Changes, such as network.topology=complete; algorithm.gossip.lr=0.1 changes one of several "
        "algorithms; a list, algorithm.lr=[0.1,0.01], makes a sweep.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="HOLDFAST_DATA", help="Folder with data sets that are not embedded.", show_envvar=True
    ),
]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also log to TensorBoard (pip install tensorboard).")
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Serve a page that follows the run, as holdfast watch does."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the run directory.")]
Device = Annotated[str, typer.Option(help="Where to train: cpu, cuda or cuda:N.")]
Processes = Annotated[
    int | None,
    typer.Option(help="Spread the nodes over this many processes of this machine; on GPUs, one for each."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def split_overrides(experiment: Path | None, overrides: list[str] | None) -> tuple[Path | None, list[str]]:
    """``holdfast run key=value`` has no file: its first argument is already an override."""
    changes = list(overrides or [])
    if experiment is not None and "=" in str(experiment) and not experiment.exists():
        return None, [str(experiment), *changes]
    return experiment, changes


def print_path(console: Console, what: str, path: object) -> None:
    """``what: path``, the path in one piece however narrow the terminal."""
    from rich.text import Text

    console.print(Text.assemble(f"{what}: ", (str(path), "bold")), soft_wrap=True)
