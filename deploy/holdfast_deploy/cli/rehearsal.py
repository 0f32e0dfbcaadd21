"""``holdfast federation try``: all members as processes on this machine, with real certificates."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.core.errors import HoldfastError, unknown
from holdfast_deploy.cli.options import File, Model

if TYPE_CHECKING:
    from holdfast_deploy.cli.rehearsal_folder import Trial
    from holdfast_deploy.federation_file import FederationFile


def rehearse(
    file: File,
    data: Annotated[
        str | None,
        typer.Option(
            help="An npz file, or the name of a data set, to split over the nodes; or module:function, which "
            "gives each node its own. By default random numbers."
        ),
    ] = None,
    model: Model = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where all members keep their files.")] = Path(
        "rehearsal"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what is in that folder first.")] = False,
    lose: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Kill this node after a third of the rounds: do the others continue?"
        ),
    ] = None,
    remove: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Have the coordinator remove this node after a third of them."),
    ] = None,
    relay: Annotated[
        bool,
        typer.Option("--relay", help="Nobody has a port: all talk through a relay, as behind firewalls."),
    ] = False,
) -> None:
    """Rehearse: the whole federation as processes on this machine, with certificates and all."""
    from holdfast.core.files import private_files
    from holdfast_deploy.cli.rehearsal_folder import Trial, change_for, lay_out
    from holdfast_deploy.cli.rehearsal_processes import Rehearsal
    from holdfast_deploy.federation_file import make_federation, read_federation
    from holdfast_deploy.site import names_code

    original, trial = read_federation(file, model).running(), Trial(lose, remove, relay)
    _check_trial(original, trial)
    if file.resolve().parent == folder.resolve():
        raise HoldfastError(f"--dir {folder} holds {file.name} itself; a rehearsal needs a folder of its own")
    if original.own_model is not None:
        print(f"own model: {original.own_model.file}, sha256 {original.own_model.sha256}")
    if fresh and folder.exists():
        if any(folder.iterdir()) and not (folder / "federation.toml").exists():
            raise HoldfastError(f"--fresh: {folder} is not the folder of a rehearsal; delete it yourself")
        shutil.rmtree(folder)
    raw, code = tomllib.loads(file.read_text(encoding="utf-8-sig")), None
    if data and names_code(data):
        data, code = None, data
    with private_files():
        if (folder / "federation.toml").exists():
            change_for(raw, trial, folder / "certs")
        else:
            lay_out(original, raw, trial, file, folder, data, write=code is None)
        federation = read_federation(folder / "federation.toml")
        if federation.id != make_federation(raw, str(file)).id:
            raise HoldfastError(f"{folder} is a rehearsal of another federation; add --fresh to start again")
        Rehearsal(federation, folder, model, code, trial).run()


def _check_trial(federation: FederationFile, trial: Trial) -> None:
    for name in filter(None, (trial.lose, trial.remove)):
        if name not in federation.names:
            raise unknown("node in the federation", name, federation.names)
    rules = federation.membership
    if trial.lose is not None and (rules is None or rules.remove_after is None):
        raise HoldfastError(
            "--lose: the federation file does not say after which time a member is left out; "
            "add [membership] with remove_after"
        )
    if trial.remove is not None and rules is None:
        raise HoldfastError("--remove: members of this federation stay as they are; add [membership]")
    if trial.relay and federation.server is not None:
        raise HoldfastError("--relay: nodes dial the server, and need no relay")
