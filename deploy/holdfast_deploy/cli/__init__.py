"""The commands of a deployed federation: ``holdfast node``, ``server`` and ``federation``."""

from __future__ import annotations

from collections.abc import Callable

import typer

from holdfast_deploy.cli import federation, node, orders, rehearsal, show, status

FEDERATION: dict[str, Callable[..., None]] = {
    "new": federation.new,
    "certs": federation.certs,
    "csr": federation.csr,
    "sign": federation.sign,
    "revoke": federation.revoke,
    "show": show.show,
    "accept": show.accept,
    "try": rehearsal.rehearse,
    "remove": orders.remove,
    "add": orders.add,
    "replace": orders.replace,
    "model": orders.model,
    "rollback": orders.rollback,
    "relay": node.relay,
    "status": status.status,
    "audit": status.audit,
}


def add_commands(app: typer.Typer) -> None:
    """Adds them to ``holdfast``, which finds this through the entry point group ``holdfast.commands``."""
    commands = typer.Typer(
        help="Train together with other organisations: set up, rehearse and watch a federation.",
        no_args_is_help=True,
    )
    for name, command in FEDERATION.items():
        commands.command(name)(command)
    app.command()(node.node)
    app.command()(node.server)
    app.add_typer(commands, name="federation")
