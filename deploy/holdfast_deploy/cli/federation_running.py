"""``holdfast node`` and ``server``, and commands for a federation that runs: only options, help is quick."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast_deploy.cli.federation_options import (
    Accept,
    Asker,
    Certs,
    File,
    Folder,
    Insecure,
    Listen,
    Log,
    Model,
    Monitor,
    Name,
    OrderFile,
    PolicyFile,
    RosterFolder,
    Samples,
    Who,
    WhoWhere,
    deploying,
    load_grpc_quietly,
)

running = typer.Typer()


@deploying
def node(
    file: File,
    name: Name,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.npz|module:function",
            help="Your npz file: x_train, y_train and, if any, x_test, y_test. Or your own function.",
        ),
    ],
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or cuda:N.")] = "cpu",
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Take part in a federation, next to your own data; they never leave this machine.

    Ctrl-C, a crash or a power cut lose nothing: the same command goes on where it stopped.
    """
    from holdfast_deploy.cli.node import MemberOptions, run_node

    options = MemberOptions(file, name, model, folder, certs, listen, insecure, log, monitor, accept, policy)
    run_node(options, data, device)


@deploying
def server(
    file: File,
    name: Name,
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Serve a federation with a central method; the server has no data."""
    from holdfast_deploy.cli.node import MemberOptions, run_server

    run_server(
        MemberOptions(file, name, model, folder, certs, listen, insecure, log, monitor, accept, policy)
    )


@running.command("remove")
@deploying
def remove(
    file: File,
    member: Who,
    name: Asker = None,
    certs: Certs = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation go on without a member, or several at once; only its coordinator can."""
    _change("remove", file, member, name, certs, None, folder, output, insecure)


@running.command("add")
@deploying
def add(
    file: File,
    member: WhoWhere,
    name: Asker = None,
    certs: Certs = None,
    samples: Samples = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation take in a member, also one that was lost and is back."""
    _change("add", file, [member], name, certs, samples, folder, output, insecure)


@running.command("replace")
@deploying
def replace(
    file: File,
    member: WhoWhere,
    name: Asker = None,
    certs: Certs = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a member go on with an empty folder, on another machine for instance."""
    _change("replace", file, [member], name, certs, None, folder, output, insecure)


def _change(
    change: Literal["remove", "add", "replace"],
    file: Path,
    members: list[str],
    name: str | None,
    certs: Path | None,
    samples: int | None,
    folder: Path | None,
    output: Path | None,
    insecure: bool,
) -> None:
    load_grpc_quietly()
    from holdfast_deploy.cli.membership import change_members

    change_members(
        file,
        change,
        members,
        asker=name,
        certs=certs,
        samples=samples,
        folder=folder,
        output=output,
        insecure=insecure,
    )


@running.command("model")
@deploying
def model(
    file: File,
    name: Name,
    model: Model = None,
    folder: Folder = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; NAME.safetensors by default.")
    ] = None,
) -> None:
    """Write a member's current model as safetensors, at any time, also while it runs."""
    from holdfast_deploy.cli.recovery import write_current_model

    write_current_model(file, name, model, folder, output)


@running.command("rollback")
@deploying
def rollback(
    file: File,
    to: Annotated[int, typer.Option(help="The last round to keep; the same for every member.")],
    name: Annotated[
        str | None, typer.Option(help="Whose folder; where members may change, whose certificate to show.")
    ] = None,
    folder: Folder = None,
    certs: Certs = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Go back to the end of an earlier round, before it went wrong.

    Where members may change, the coordinator orders it, and all go back together. Else it puts back one
    stopped member; run it for every member, each at its own site.
    """
    load_grpc_quietly()
    from holdfast_deploy.cli.recovery import roll_back

    roll_back(file, name, to, folder, certs, output, insecure=insecure)


@running.command("relay")
@deploying
def relay(file: File, certs: Certs = None, listen: Listen = None) -> None:
    """Pass on what members cannot tell one another directly; the relay cannot read it."""
    from holdfast_deploy.cli.relay import run_relay

    run_relay(file, certs, listen)


@running.command("status")
@deploying
def status(
    file: File,
    name: Annotated[
        str | None, typer.Option(help="Whose certificate to show; the only one there is.")
    ] = None,
    certs: Certs = None,
    insecure: Insecure = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Who is up, at which round, how far behind, bytes sent, last error."""
    load_grpc_quietly()
    from holdfast_deploy.cli.federation import show_status

    show_status(file, name, certs, insecure=insecure, as_json=json)


@running.command("audit")
@deploying
def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A member's folder, such as node-alpha.")],
    against: Annotated[
        list[Path] | None, typer.Option(help="Other members' folders: what they saw of this log.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines as they are, for programs.")] = False,
) -> None:
    """Check a member's audit log, and print it: who was given what, who gave what, and when."""
    from holdfast_deploy.cli.audit import show_audit

    show_audit(folder, against or [], as_json=json)
