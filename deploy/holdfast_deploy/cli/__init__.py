"""The commands of a deployed federation: ``holdfast node``, ``server`` and ``federation``."""

from __future__ import annotations

import typer

from holdfast_deploy.cli.federation_app import federation
from holdfast_deploy.cli.federation_running import node, server


def add_commands(app: typer.Typer) -> None:
    """Adds them to ``holdfast``, which finds this through the entry point group ``holdfast.commands``."""
    app.command()(node)
    app.command()(server)
    app.add_typer(federation, name="federation")
