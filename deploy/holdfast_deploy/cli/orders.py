"""``holdfast federation remove``, ``add``, ``replace``, ``model``, ``rollback``: while a federation runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.core.errors import HoldfastError
from holdfast_deploy.cli.options import (
    Asker,
    Certs,
    File,
    Folder,
    Insecure,
    Model,
    Name,
    OrderFile,
)

if TYPE_CHECKING:
    from holdfast_deploy.federation_file import FederationFile
    from holdfast_deploy.storage.messages import MessageFile

RosterFolder = Annotated[
    Path | None,
    typer.Option("--dir", help="A member's folder, which knows the roster; for when nobody can be reached."),
]
MemberWhere = Annotated[
    str,
    typer.Argument(metavar="NAME[=host:port]", help="The member, and where it is reached, if that is new."),
]


def remove(
    file: File,
    member: Annotated[list[str], typer.Argument(metavar="NAME...", help="The member, or several at once.")],
    name: Asker = None,
    certs: Certs = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation continue without a member, or several at once; only its coordinator can."""
    from holdfast_deploy.cli.coordinator import Coordinator

    coordinator = Coordinator(file, certs, name, insecure=insecure)
    coordinator.change("remove", member, folder=folder, output=output)


def add(
    file: File,
    member: MemberWhere,
    name: Asker = None,
    certs: Certs = None,
    samples: Annotated[
        int | None, typer.Option(help="How many samples it has, where the file says so.")
    ] = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a running federation take in a member, also one that was lost and is back."""
    from holdfast_deploy.cli.coordinator import Coordinator

    coordinator = Coordinator(file, certs, name, insecure=insecure)
    coordinator.change("add", [member], samples=samples, folder=folder, output=output)


def replace(
    file: File,
    member: MemberWhere,
    name: Asker = None,
    certs: Certs = None,
    folder: RosterFolder = None,
    output: OrderFile = None,
    insecure: Insecure = False,
) -> None:
    """Have a member continue with an empty folder, on another machine for instance."""
    from holdfast_deploy.cli.coordinator import Coordinator

    coordinator = Coordinator(file, certs, name, insecure=insecure)
    coordinator.change("replace", [member], folder=folder, output=output)


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
    import tempfile

    from holdfast.contract import Algorithm, ServerAlgorithm
    from holdfast.core.files import private_files
    from holdfast.core.tree import tree_map
    from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.member.template import channel_memories, state_template
    from holdfast_deploy.membership.log import read_decisions
    from holdfast_deploy.membership.roster import roster_folder
    from holdfast_deploy.site import initial_model
    from holdfast_deploy.storage.results import write_model

    federation = read_federation(file, model).running()
    where = _member_folder(federation, file, name, folder)
    for decision in reversed(read_decisions(where / "membership")):
        if (place := roster_folder(where, decision.roster.number)).exists() and any(place.glob("state*")):
            federation, where = federation.in_roster(decision.roster), place
            break  # later ones it has not begun, or takes no part in
    federation.member(name)
    target = (output or file.parent / f"{name}.safetensors").resolve()
    if target.suffix != ".safetensors":
        raise HoldfastError(f"--output: expected a name that ends in .safetensors, got {target.name}")
    if not target.parent.is_dir():
        raise HoldfastError(f"--output: {target.parent} is not a folder")
    method, flat = federation.member_method, initial_model(federation)
    leads, client = isinstance(method, ServerAlgorithm), name in federation.names
    if (leads and client) or (not leads and not client):
        keeper = federation.server.name if leads and federation.server else "every node"
        raise HoldfastError(f"{name} keeps no model between rounds: {keeper} does")
    with private_files(), tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as temporary:
        state = _current_state(where, Path(temporary) / "state")
        if state.header.federation != federation.id:
            raise HoldfastError(f"{where} is of another federation file")
        if state.header.sender != name:
            raise HoldfastError(f"{where} is of another member, {state.header.sender}: see --name and --dir")
        if isinstance(method, ServerAlgorithm):
            memories = channel_memories(federation, flat.x0)
            memory = tree_map(lambda t: t[0], memories[0].receiver) if memories else ()
            template = with_channel_state(method.at(0).init_server(flat.x0), memory)
            row = method.at(0).model(split_channel_state(state.read(template, flat.x0.device))[0])
        else:
            template = state_template(federation, federation.names.index(name), flat.x0)
            assert isinstance(method, Algorithm)
            row = method.model(split_channel_state(state.read(template, flat.x0.device))[0])[0]
    notes = {"federation": federation.name, "node": name, "rounds": state.header.round}
    with private_files():
        write_model(target.parent, flat, row, notes, target.stem)
    print(f"wrote {target.name}: the model of {name} after {state.header.round} rounds")


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
    from holdfast.contract import ServerAlgorithm
    from holdfast.core.files import private_files
    from holdfast.core.randomness import cohort
    from holdfast.core.tree import has_leaves
    from holdfast_deploy.cli.coordinator import Coordinator
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.member.template import state_template
    from holdfast_deploy.site import initial_model
    from holdfast_deploy.storage.snapshots import put_back

    federation = read_federation(file)
    if to < 0 or to > federation.rounds:
        raise HoldfastError(f"--to: expected a round from 0 to {federation.rounds}, got {to}")
    if federation.membership is not None:
        Coordinator(file, certs, name, insecure=insecure).roll_back(to, folder=folder, output=output)
        return
    if name is None:
        raise HoldfastError("--name: say which member is put back; its folder has to be on this machine")
    where = _member_folder(federation, file, name, folder)

    def same(done: int) -> bool:
        """Whether the member computed nothing between."""
        if not isinstance(federation.method, ServerAlgorithm) or name not in federation.names:
            return done == to
        node, nodes = federation.names.index(name), len(federation.node)
        between = range(done, to)
        if federation.secret_cohorts:  # only the server knows the cohorts, but some clients remember nothing
            state = state_template(federation, node, initial_model(federation).x0)
            return done == to or not has_leaves(state)
        return all(node not in cohort(federation.seed, r, nodes, federation.cohort) for r in between)

    with private_files():
        round = put_back(where, to, same)
    print(f"{name} is back at the end of round {to} (state of round {round})")
    print("run the same for every member before you start any of them; one that is left out will be named")


def _member_folder(federation: FederationFile, path: Path, name: str, folder: Path | None) -> Path:
    """Where the member called ``name`` keeps its files."""
    if federation.membership is None:  # else it may have been added
        federation.member(name)  # complains about a name that there is not
    serves = federation.server is not None and federation.server.name == name
    return folder or path.parent / f"{'server' if serves else 'node'}-{name}"


def _current_state(folder: Path, copy: Path) -> MessageFile:
    """The newest intact state; the member may be running, and replace its files meanwhile."""
    from holdfast_deploy.storage.messages import DamagedError, MessageFile

    for name in ("state", "state.previous"):
        try:
            os.link(folder / name, copy)
            state = MessageFile(copy)
            state.verify()
        except FileNotFoundError:
            continue
        except HoldfastError:
            copy.unlink()
            continue
        return state
    if (folder / "state").exists() or (folder / "state.previous").exists():
        raise DamagedError(
            f"{folder}: neither state nor state.previous is intact; the member repairs what it can"
        )
    raise HoldfastError(f"{folder} holds no state: has the member begun, and is this its --dir?")
