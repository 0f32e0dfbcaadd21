"""``holdfast federation status`` and ``audit``: what members say of themselves, and what they wrote down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.cli.options import Certs, File, Insecure

if TYPE_CHECKING:
    from rich.table import Table

    from holdfast_deploy.federation_file import FederationFile
    from holdfast_deploy.ops.audit import Head
    from holdfast_deploy.wire.credentials import Credentials

UNSAID = ("n", "time", "event", "previous", "hash", "head")  # of a line of an audit log


def status(
    file: File,
    name: Annotated[
        str | None, typer.Option(help="Whose certificate to show; the only one there is.")
    ] = None,
    certs: Certs = None,
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Who is up, at which round, how far behind, bytes sent, last error."""
    import asyncio

    from rich.console import Console

    from holdfast.core.files import json_text
    from holdfast_deploy.cli.coordinator import latest_roster, only_key
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.wire.credentials import load_credentials
    from holdfast_deploy.wire.listener import require_loopback

    federation = read_federation(file)
    folder = certs or file.parent / "certs"
    if insecure:
        require_loopback(federation, None)
    asker = name or (federation.names[0] if insecure else only_key(federation, folder))
    credentials = None if insecure else load_credentials(folder, asker, federation.coordinator)
    if federation.membership is not None:
        now = latest_roster(federation, asker, credentials)
        federation = federation if now is None else federation.in_roster(now)
        if name is None and not insecure and asker not in [member.name for member in federation.members]:
            asker = only_key(federation, folder)  # members talk only to those of the roster
            credentials = load_credentials(folder, asker, federation.coordinator)
    answers = asyncio.run(_ask_all(federation, asker, credentials))
    if as_json:
        print(json_text(answers, indent=2))
        return
    Console(markup=False, emoji=False).print(_status_table(federation, answers))  # others' words


async def _ask_all(
    federation: FederationFile, asker: str, credentials: Credentials | None
) -> dict[str, dict[str, Any]]:
    """What every member that can be reached says about itself, by name."""
    import asyncio

    from holdfast_deploy.ops.events import Events, silence
    from holdfast_deploy.storage.links import Dependencies
    from holdfast_deploy.wire.client import Connection

    async def ask(peer: str) -> dict[str, Any]:
        nothing = Dependencies(asker, "", ())  # a member that only asks takes part in no run
        link = Connection(federation, asker, peer, "", Path(), credentials, events, {}, nothing)
        try:
            return await link.status(timeout=5.0)
        finally:
            await link.close()

    events = Events(asker, silence)
    reachable = [federation.server] if federation.server else federation.node
    answered = await asyncio.gather(*(ask(member.name) for member in reachable))
    answers = {member.name: answer for member, answer in zip(reachable, answered, strict=True)}
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


def _status_table(federation: FederationFile, answers: dict[str, dict[str, Any]]) -> Table:
    from rich.table import Table

    from holdfast.report.format import bytes_text

    table = Table("member", "round", "lag", "doing", "sent", "waited", "last error", box=None, pad_edge=False)
    furthest = max((answer.get("round", 0) for answer in answers.values()), default=0)
    for name, answer in answers.items():
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
    from holdfast_deploy.wire.certificate_watch import WARN_DAYS

    return f"certificate expires in {days:.0f} days" if days is not None and days < WARN_DAYS else ""


def figures_text(metrics: dict[str, float]) -> str:
    """The figures of a node, for a cell of a table."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())


def audit(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A member's folder, such as node-alpha.")],
    against: Annotated[
        list[Path] | None, typer.Option(help="Other members' folders: what they saw of this log.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the lines as they are, for programs.")
    ] = False,
) -> None:
    """Check a member's audit log, and print it: who was given what, who gave what, and when."""
    import json
    import sys

    from holdfast_deploy.ops.audit import NAME, AuditError, check_heads, read_audit

    entries: list[dict[str, Any]] = []
    complaint: AuditError | None = None
    try:
        for entry in read_audit(folder):
            entries.append(entry)
        check_heads(folder, entries, _heads(folder, entries, against or []))
    except AuditError as error:
        complaint = error
    for entry in entries:
        print(json.dumps(entry) if as_json else printable(_line(entry)))
    if complaint is not None:  # the lines up to the first false one are printed
        sys.stdout.flush()
        raise complaint
    head = entries[-1]["hash"] if entries else "none"
    print(f"{folder / NAME}: {len(entries)} lines, intact; the last one is {head}", file=sys.stderr)


def _heads(folder: Path, entries: list[dict[str, Any]], against: list[Path]) -> Iterator[tuple[str, Head]]:
    """What the saved state, and others' logs, have seen at the end of the log."""
    from holdfast_deploy.ops.audit import NAME, Head, read_audit
    from holdfast_deploy.storage.messages import DamagedError, MessageFile

    for state in (folder / "state", folder / "state.previous"):
        if state.exists():
            try:
                saved = MessageFile(state)
                saved.verify()
            except DamagedError:
                continue  # the member itself says so
            yield state.name, Head(*saved.header.notes["audit"])
    member = next((entry["member"] for entry in entries if "member" in entry), None)
    for other in against:
        seen = list(read_audit(other))
        if member is None or not any(entry.get("peer") == member for entry in seen):
            raise HoldfastError(
                f"{other / NAME} says nothing about {member or folder}; name a neighbour's folder"
            )
        for entry in seen:
            head = Head.parse(entry.get("head", "")) if entry.get("peer") == member else None
            if head is not None:
                yield str(other / NAME), head


def _line(entry: dict[str, Any]) -> str:
    """An entry in readable form."""
    from holdfast.report.format import bytes_text

    words = [str(entry["n"]), entry["time"], entry["event"]]
    for key, value in entry.items():
        if key == "digest":
            words.append(f"digest {value[:12]}")
        elif key == "bytes":
            words.append(bytes_text(value))
        elif key not in UNSAID:
            words.append(f"{key} {value}")
    return " ".join(words)
