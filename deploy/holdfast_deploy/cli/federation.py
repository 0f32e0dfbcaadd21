"""``holdfast federation new``, ``certs``, ``csr``, ``sign`` and ``status``."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.files import json_text, private_files, write_atomic
from holdfast.core.validation import explain, place
from holdfast.data.tables import Columns
from holdfast.experiments.spec import apply_override
from holdfast.report.format import bytes_text
from holdfast_deploy.cli.membership import latest_roster
from holdfast_deploy.consent import accept, holds_key, shown, sign_federation, signature_path
from holdfast_deploy.federation_file import FederationFile, make_federation, read_federation
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.relay.switchboard import Switchboard, members_scope
from holdfast_deploy.signing import KEY_NAME, make_key, public_key
from holdfast_deploy.sites import read_data
from holdfast_deploy.storage.incarnations import Dependencies
from holdfast_deploy.wire.authority import (
    check_request,
    make_authority,
    make_certificates,
    make_request,
    sign_request,
)
from holdfast_deploy.wire.credentials import load_credentials, serial_of
from holdfast_deploy.wire.links import Connection
from holdfast_deploy.wire.listening import require_loopback
from holdfast_deploy.wire.revocations import Revoked, revoke
from holdfast_deploy.wire.vigil import WARN_DAYS

COMMENTS = {
    "name =": "All members use the same copy of this file; only [limits] and addresses may differ.",
    "[problem]": "What is learned. Samples enter as (x - mean)/std, uint8 pixels as (x/255 - mean)/std.",
    "[network]": "Who talks to whom.",
    "[algorithm]": "'holdfast list algorithms' shows all methods and their parameters.",
    "coordinator =": "Whose signature holds for all members: the public half of certs/coordinator.key.",
    "evaluate_every =": "Rounds between measurements at home. Others may see what shared_metrics lists:\n"
    "# local_loss, test_accuracy, test_loss.",
    "[limits]": "Seconds to wait for a neighbour, and for a sporadic link; the largest message in MiB.",
    "[server]": "The only one that has to be reachable.",
    "[[node]]": "The members. Certificates carry their names.",
}


def new_federation(
    *,
    nodes: str,
    algorithm: str,
    overrides: list[str],
    topology: str | None,
    server: str | None,
    rounds: int,
    data: Path | None,
    input_shape: str | None,
    classes: int | None,
    output: Path,
    force: bool,
) -> None:
    """``holdfast federation new``"""
    if output.exists() and not force:
        raise HoldfastError(f"{output} exists already; choose another name, or overwrite it with --force")
    raw: dict[str, Any] = {
        "name": "federation",
        "rounds": rounds,
        "seed": 0,
        "dtype": "float32",
        "compression": "none",
        "evaluate_every": 1,
        "shared_metrics": [],
        "problem": _problem(data, input_shape, classes),
        "network": {"topology": topology or ("server" if server else "ring")},
        "algorithm": {"name": algorithm},
        "limits": {"wait": 3600.0, "exchange": 60.0, "message_mib": 8192.0},
    }
    if server:
        raw["server"] = _member(server)
    raw["node"] = [_member(text) for text in nodes.split(",")]
    for override in overrides:
        apply_override(raw, override)
        if isinstance(raw["algorithm"], list):
            raw["algorithm"] = raw["algorithm"][0]
    make_federation(raw, str(output))  # complains before anything is written
    certs = output.parent / "certs"
    with private_files():
        raw = {"name": raw.pop("name"), "coordinator": public_key(make_key(certs)), **raw}
    federation = make_federation(raw, str(output))
    write_atomic(output, _commented(tomli_w.dumps(raw)).encode())
    sign_federation(output, federation, certs)
    with suppress(OSError):  # no home to note it in
        accept(federation, output)
    print(f"wrote {output}: {len(federation.node)} nodes, fingerprint {shown(federation.id)}")
    print(f"wrote {signature_path(output)}, signed with {certs / KEY_NAME}, the coordinator's key: guard it")
    print(f"next: holdfast federation try {output}; then every member: federation csr {output} --name NAME")


def _problem(data: Path | None, input_shape: str | None, classes: int | None) -> dict[str, Any]:
    if (data is None) == (input_shape is None):
        raise HoldfastError("say what the samples look like: either --data example.npz, or --input-shape 64")
    if data is not None:
        dataset = read_data(data)
        if isinstance(dataset, Columns):
            return {"columns": dataset.shapes, "model": "linear", "loss": "training-step", "batch_size": 32}
        shape, scale = list(dataset.input_shape), {"mean": dataset.mean, "std": dataset.std}
        classes = classes if classes is not None else dataset.classes
    else:
        assert input_shape is not None
        try:
            shape, scale = [int(part) for part in input_shape.split(",")], {"mean": 0.0, "std": 1.0}
        except ValueError:
            raise HoldfastError(
                f"--input-shape: expected such as 64 or 1,28,28, got {input_shape!r}"
            ) from None
    problem: dict[str, Any] = {"input_shape": shape}
    if classes is not None:
        problem["classes"] = classes
    return problem | {"model": "linear", "loss": "cross-entropy", "batch_size": 32, "l2": 0.0} | scale


def _member(text: str) -> dict[str, str]:
    """``name=host:port``; a node behind a server may be just a name."""
    name, _, address = text.strip().partition("=")
    return {"name": name, "address": address} if address else {"name": name}


def _commented(text: str) -> str:
    lines, seen = [], set()
    for line in text.splitlines():
        for start, comment in COMMENTS.items():
            if line.startswith(start) and start not in seen:
                seen.add(start)
                lines.append(f"# {comment}")
        lines.append(line)
    return "\n".join(lines) + "\n"


# --- certificates ------------------------------------------------------------------------------------------


@private_files()
def make_all_certificates(path: Path, folder: Path | None, days: float) -> None:
    """``holdfast federation certs``"""
    federation = read_federation(path)
    target = folder or path.parent / "certs"
    names = [member.name for member in federation.certified]
    make_certificates(target, federation.name, names, days)
    _sign_own(path, federation, target)
    print(f"wrote {target}: ca.crt, ca.key and NAME.crt, NAME.key for {', '.join(names)}")
    print("give every member ca.crt and its own NAME.crt and NAME.key over a safe channel; guard ca.key")


@private_files()
def request_certificate(path: Path, name: str, folder: Path | None, *, encrypt: bool) -> None:
    """``holdfast federation csr``"""
    federation = read_federation(path)
    names = [member.name for member in federation.certified]
    if name not in names and federation.membership is None:  # else it may be added later
        raise unknown("name in the federation", name, names)
    target = folder or path.parent / "certs"
    request = make_request(target, name, encrypt=encrypt)
    print(f"wrote {request}; send it to whoever holds ca.key, who sends {name}.crt and ca.crt back")
    key = check_request(target, request, [name], replace=True).fingerprint
    print(f"they will be shown this fingerprint of your key; tell it to them in another way: {key}")


@private_files()
def sign_requests(
    path: Path, requests: list[Path], folder: Path | None, days: float, *, replace: bool
) -> None:
    """``holdfast federation sign``"""
    federation = read_federation(path)
    target = folder or path.parent / "certs"
    names = [member.name for member in federation.certified]
    if federation.membership is not None:  # others may be added; what they are called is shown, and compared
        names += [request.stem for request in requests if request.stem not in [*names, "ca"]]
    for request in requests:  # all of them, before any is signed
        asked = check_request(target, request, names, replace=replace)
        print(f"{request} asks for the name {asked.name} with the key {asked.fingerprint}")
    if not _sign_own(path, federation, target) and not requests:
        raise HoldfastError(f"{target} holds no key of the coordinator of {path}: only it can sign the file")
    if not requests:
        print(f"wrote {signature_path(path)}; fingerprint of the federation: {shown(federation.id)}")
        return
    make_authority(target, federation.name)
    for request in requests:
        print(f"wrote {sign_request(target, request, names, days, replace=replace)}")
    print("compare each fingerprint with what its member was shown, before you send anything back")
    print(f"send each member its certificate and {target / 'ca.crt'}; neither is secret")


@private_files()
def revoke_certificate(path: Path, name: str, serial: str | None, reason: str, folder: Path | None) -> None:
    """``holdfast federation revoke``"""
    federation = read_federation(path)
    target = folder or path.parent / "certs"
    if federation.coordinator is None:
        raise HoldfastError(
            f"{path} names no coordinator: only one can revoke, and members must know its key"
        )
    federation.member(name)
    if serial is None:
        own = target / f"{name}.crt"
        if not own.exists():
            raise HoldfastError(f"{own} is missing: say which certificate, by --serial")
        serial = serial_of(own.read_bytes())
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        entry = Revoked(name=name, serial=serial.replace(":", "").upper(), time=now, reason=reason)
    except ValidationError as error:
        raise HoldfastError(f"--{place(error.errors()[0]['loc'])}: {explain(error)}") from None
    wrote = revoke(target, entry, federation.coordinator)
    print(f"wrote {wrote}: the certificate {entry.serial} of {name} is revoked")
    print("send it to every member, who puts it into its folder of certificates; running members take it up")


def _sign_own(path: Path, federation: FederationFile, folder: Path) -> bool:
    """Signs the federation file if ``folder`` has its coordinator's key, and accepts it; whether it has."""
    if not holds_key(folder, federation):
        return False
    sign_federation(path, federation, folder)
    with suppress(OSError):  # no home to note it in
        accept(federation, path)
    return True


# --- status ------------------------------------------------------------------------------------------------


def show_status(path: Path, name: str | None, certs: Path | None, *, insecure: bool, as_json: bool) -> None:
    """``holdfast federation status``"""
    federation = read_federation(path)
    folder = certs or path.parent / "certs"
    if insecure:
        require_loopback(federation, None)
    asker = name or (federation.names[0] if insecure else _only_key(federation, folder))
    credentials = None if insecure else load_credentials(folder, asker, federation.coordinator)
    scope = ""
    if federation.membership is not None:
        scope, now = members_scope(federation), latest_roster(federation, asker, credentials)
        federation = federation if now is None else federation.in_roster(now)
        if name is None and not insecure and asker not in [member.name for member in federation.members]:
            asker = _only_key(federation, folder)  # members talk only to those of the roster
            credentials = load_credentials(folder, asker, federation.coordinator)
    told = asyncio.run(_ask_all(federation, asker, credentials, scope))
    if as_json:
        print(json_text(told, indent=2))
        return
    Console(markup=False, emoji=False).print(_status_table(federation, told))  # others' words


def _only_key(federation: FederationFile, folder: Path) -> str:
    found = [member.name for member in federation.members if (folder / f"{member.name}.key").exists()]
    if not found:
        raise HoldfastError(f"{folder} holds no key of a member; name the folder with --certs")
    return found[0]


async def _ask_all(
    federation: FederationFile, asker: str, credentials: Any, scope: str
) -> dict[str, dict[str, Any]]:
    """What every member that can be reached says about itself, by name; ``scope``: of a relay's calls."""

    async def ask(peer: str) -> dict[str, Any]:
        nothing = Dependencies(asker, "", ())  # who only looks on takes part in no run
        channel = board.channel_to(peer) if board and federation.relayed(asker, peer) else None
        link = Connection(
            federation, asker, peer, "", Path(), credentials, events, {}, nothing, channel=channel
        )
        try:
            return await link.status(timeout=5.0)
        finally:
            await link.close()

    board, events = None, Events(asker, silence)
    if federation.relay is not None and credentials is not None:
        board = Switchboard(federation, asker, credentials, events, scope)
        board.open()
    reachable = [federation.server] if federation.server else federation.node
    told = await asyncio.gather(*(ask(member.name) for member in reachable))
    if board is not None:
        await board.close()
    answers = {member.name: answer for member, answer in zip(reachable, told, strict=True)}
    if federation.server:
        clients = answers[federation.server.name].get("clients") or {}
        for node in federation.node:
            seen = clients.get(node.name)
            answers[node.name] = (
                {"round": seen["round"], "phase": f"seen {seen['seconds_ago']:.0f} s ago"}
                if seen
                else {"phase": "not seen yet"}
            )
    return answers


def _status_table(federation: FederationFile, told: dict[str, dict[str, Any]]) -> Table:
    table = Table("member", "round", "lag", "doing", "sent", "waited", "last error", box=None, pad_edge=False)
    furthest = max((answer.get("round", 0) for answer in told.values()), default=0)
    for name, answer in told.items():
        known = "round" in answer
        table.add_row(
            name,
            f"{answer['round']}/{federation.rounds}" if known else "-",
            str(furthest - answer["round"]) if known else "-",
            ", ".join(filter(None, (_roster_text(answer), answer["phase"], figures_text(_figures(answer))))),
            bytes_text(answer["payload_bytes"]) if "payload_bytes" in answer else "-",
            f"{answer['waiting_seconds']:.0f} s" if "waiting_seconds" in answer else "-",
            "; ".join(filter(None, (_expiry(answer.get("certificate_days")), answer.get("last_error", "")))),
        )
    return table


def _figures(answer: dict[str, Any]) -> dict[str, float]:
    """What a member shows of itself: shared metrics, and what it has spent of a privacy budget."""
    spent = {} if answer.get("epsilon") is None else {"epsilon spent": answer["epsilon"]}
    return {**answer.get("metrics", {}), **spent}


def _roster_text(answer: dict[str, Any]) -> str:
    return f"roster {answer['roster']}" if answer.get("roster") else ""


def _expiry(days: float | None) -> str:
    return f"certificate expires in {days:.0f} days" if days is not None and days < WARN_DAYS else ""


def figures_text(metrics: dict[str, float]) -> str:
    """The figures of a node, for a cell of a table."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
