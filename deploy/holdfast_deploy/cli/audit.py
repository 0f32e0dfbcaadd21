"""``holdfast federation audit``"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, printable
from holdfast.report.format import bytes_text
from holdfast_deploy.ops.audit import NAME, AuditError, Head, check_heads, read_audit
from holdfast_deploy.storage.messages import DamagedError, MessageFile

UNSAID = ("n", "time", "event", "previous", "hash", "head")


def show_audit(folder: Path, against: list[Path], *, as_json: bool) -> None:
    """Prints the log in ``folder``, up to its first false line; leaves with an error if there is one."""
    entries: list[dict[str, Any]] = []
    complaint: AuditError | None = None
    try:
        for entry in read_audit(folder):
            entries.append(entry)
        check_heads(folder, entries, _heads(folder, entries, against))
    except AuditError as error:
        complaint = error
    for entry in entries:
        print(json.dumps(entry) if as_json else printable(_line(entry)))
    if complaint is not None:
        sys.stdout.flush()
        raise complaint
    head = entries[-1]["hash"] if entries else "none"
    print(f"{folder / NAME}: {len(entries)} lines, intact; the last one is {head}", file=sys.stderr)


def _heads(folder: Path, entries: list[dict[str, Any]], against: list[Path]) -> Iterator[tuple[str, Head]]:
    """What the saved state, and others' logs, have seen at the end of the log."""
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
    """An entry for people."""
    words = [str(entry["n"]), entry["time"], entry["event"]]
    for key, value in entry.items():
        if key == "digest":
            words.append(f"digest {value[:12]}")
        elif key == "bytes":
            words.append(bytes_text(value))
        elif key not in UNSAID:
            words.append(f"{key} {value}")
    return " ".join(words)
