"""``holdfast paper``: only its options, so that help is quick. Found through an entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.cli.options import AsJson, DataDir, Device
from holdfast.core.errors import HoldfastError

Scale = Literal["small", "full"]

app = typer.Typer(help="The papers as executable claims: list them, run them, judge them.")


@app.callback(invoke_without_command=True)
def paper(context: typer.Context, json: AsJson = False) -> None:
    """The papers as executable claims; without a command, list them and their experiments."""
    if context.invoked_subcommand is None:
        from holdfast_papers.commands import list_papers

        list_papers(as_json=json)
    elif json:
        raise HoldfastError(
            f"--json comes after the command: holdfast paper {context.invoked_subcommand} --json"
        )


@app.command("run")
def paper_run(
    wanted: Annotated[
        str, typer.Argument(metavar="PAPER[/EXPERIMENT]", help="Such as local-gecl/table-3, local-gecl, all.")
    ],
    scale: Annotated[
        Scale,
        typer.Option(help="small: minutes on two cores; full: the paper's setting but for what a note says."),
    ] = "small",
    data_dir: DataDir = None,
    device: Device = "cpu",
    runs_dir: Annotated[Path, typer.Option(help="The runs go to papers/ in this folder.")] = Path("runs"),
    seed: Annotated[
        int | None,
        typer.Option(
            help="Run this seed only, one per process; the command without it joins and judges them."
        ),
    ] = None,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Run nothing: judge what is finished, and say what is missing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run experiments of a paper, draw its figures, and say which of its claims hold.

    Finished runs are not repeated, interrupted ones continue. Exit code 1 if a claim fails.
    """
    from holdfast_papers.commands import judge_finished, run_papers

    if no_run:
        judge_finished(wanted, scale, data_dir, device, runs_dir, as_json=json)
    else:
        run_papers(wanted, scale, data_dir, device, runs_dir, seed, as_json=json)


@app.command("fill")
def paper_fill(
    document: Annotated[Path, typer.Argument(help="Markdown, such as docs/papers/local-gecl.md.")],
    runs_dir: Annotated[Path, typer.Option(help="Where 'holdfast paper run' put its runs.")] = Path("runs"),
) -> None:
    """Copy verdicts and figures of finished experiments into their marked places in a document."""
    from holdfast_papers.commands import fill_document

    fill_document(document, runs_dir)


def add_commands(main: typer.Typer) -> None:
    """Adds ``paper`` to ``holdfast``, which finds this function through the group ``holdfast.commands``."""
    main.add_typer(app, name="paper")
