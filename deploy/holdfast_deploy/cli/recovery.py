"""``holdfast federation model`` and ``rollback``: what a member's folder holds, and how to go back in it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from holdfast.contract import Algorithm, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.core.files import private_files
from holdfast.core.randomness import cohort
from holdfast.core.tree import has_leaves, tree_map
from holdfast.engines.common.channel_run import split_channel_state, with_channel_state
from holdfast_deploy.cli.membership import roll_members_back
from holdfast_deploy.federation_file import FederationFile, read_federation
from holdfast_deploy.member.template import channel_memories, state_template
from holdfast_deploy.membership.ledger import read_decisions
from holdfast_deploy.sites import initial_model
from holdfast_deploy.storage.messages import DamagedError, MessageFile
from holdfast_deploy.storage.results import write_model
from holdfast_deploy.storage.snapshots import put_back


def member_folder(federation: FederationFile, path: Path, name: str, folder: Path | None) -> Path:
    """Where the member called ``name`` keeps its files."""
    if federation.membership is None:  # else it may have been added
        federation.member(name)  # complains about a name that there is not
    serves = federation.server is not None and federation.server.name == name
    return folder or path.parent / f"{'server' if serves else 'node'}-{name}"


@private_files()
def write_current_model(
    path: Path, name: str, model: str | None, folder: Path | None, output: Path | None
) -> None:
    """``holdfast federation model``"""
    federation = read_federation(path, model).running()
    where = member_folder(federation, path, name, folder)
    for decision in reversed(read_decisions(where / "membership")):
        if (place := where / f"roster-{decision.roster.number}").exists() and any(place.glob("state*")):
            federation, where = federation.in_roster(decision.roster), place
            break  # later ones it has not begun, or takes no part in
    federation.member(name)
    target = (output or path.parent / f"{name}.safetensors").resolve()
    if target.suffix != ".safetensors":
        raise HoldfastError(f"--output: expected a name that ends in .safetensors, got {target.name}")
    if not target.parent.is_dir():
        raise HoldfastError(f"--output: {target.parent} is not a folder")
    method, flat = federation.member_method, initial_model(federation)
    leads, client = isinstance(method, ServerAlgorithm), name in federation.names
    if (leads and client) or (not leads and not client):
        keeper = federation.server.name if leads and federation.server else "every node"
        raise HoldfastError(f"{name} keeps no model between rounds: {keeper} does")
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as temporary:
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
    write_model(target.parent, flat, row, notes, target.stem)
    print(f"wrote {target.name}: the model of {name} after {state.header.round} rounds")


def _current_state(folder: Path, copy: Path) -> MessageFile:
    """The newest intact state; the member may be running, and replace its files meanwhile."""
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


def roll_back(
    path: Path,
    name: str | None,
    to: int,
    folder: Path | None,
    certs: Path | None,
    output: Path | None,
    *,
    insecure: bool,
) -> None:
    """``holdfast federation rollback``"""
    federation = read_federation(path)
    if to < 0 or to > federation.rounds:
        raise HoldfastError(f"--to: expected a round from 0 to {federation.rounds}, got {to}")
    if federation.membership is not None:
        roll_members_back(path, to, asker=name, certs=certs, folder=folder, output=output, insecure=insecure)
    elif name is None:
        raise HoldfastError("--name: say which member is put back; its folder has to be on this machine")
    else:
        roll_member_back(path, name, to, folder)


@private_files()
def roll_member_back(path: Path, name: str, to: int, folder: Path | None) -> None:
    """One stopped member of a federation whose members stay."""
    federation = read_federation(path)
    where = member_folder(federation, path, name, folder)

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

    round = put_back(where, to, same)
    print(f"{name} is back at the end of round {to} (state of round {round})")
    print("run the same for every member before you start any of them; who is left out will be named")
