"""Live pages of a federation: of a member on its own machine, and of all members of a rehearsal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.experiments.record import RunRecord
from holdfast.experiments.record_files import MEMBER_COLUMNS
from holdfast.report.following import LOG_LINES, Following, LogLine
from holdfast.report.live import LiveView, is_run
from holdfast.report.page_data import network_data
from holdfast.report.sections import Member
from holdfast_deploy.federation_file import read_federation

FEDERATION = "federation.toml"
TAIL = 64 * 1024  # bytes of a member's log that are read


def federation_view(folder: Path) -> LiveView:
    """All members that keep their files in ``folder``, as in a rehearsal, and their logs."""
    federation = read_federation(folder / FEDERATION)
    network = federation.member_network
    homes = {node.name: folder / f"node-{node.name}" for node in federation.node}
    if federation.server is not None:
        homes[federation.server.name] = folder / f"server-{federation.server.name}"

    def members(records: Sequence[RunRecord]) -> list[Member]:
        recorded = {record.name: record for record in records}
        doing = {name: _doing(_entries(folder / f"{name}.log")) for name in homes}
        return [
            Member.of_record(recorded[name], doing[name])
            if name in recorded
            else Member(name, rounds=federation.rounds, doing=doing[name] or "not seen yet")
            for name in homes
        ]

    return LiveView(
        Following(lambda: [home for home in homes.values() if is_run(home)]),
        members,
        network_data(federation.names, network.weighted_links(), is_server=network.is_server),
        lambda: _log([entry for name in homes for entry in _entries(folder / f"{name}.log")]),
        federation.name,
    )


def _entries(file: Path) -> list[dict[str, Any]]:
    """The end of a member's log; what is no entry of it is left out."""
    if not file.is_file():
        return []
    with file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - TAIL))
        lines = log.read().decode(errors="replace").splitlines()
    found = []
    for line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the first may be cut off; others may print, too
            continue
        if isinstance(entry, dict) and {"time", "level", "node", "event"} <= set(entry):
            found.append(entry)
    return found


def _doing(entries: Sequence[dict[str, Any]]) -> str:
    return str(entries[-1]["event"]) if entries else ""


def _log(entries: Sequence[dict[str, Any]]) -> list[LogLine]:
    """Everything but finished rounds, in the order of time."""
    lines = []
    for entry in sorted(entries, key=lambda entry: str(entry["time"])):
        if entry["event"] == "round done":
            continue
        rest = {k: v for k, v in entry.items() if k not in ("time", "level", "node", "event", "metrics")}
        words = ", ".join(f"{key} {value}" for key, value in rest.items())
        text = f"{entry['node']}: {entry['event']}" + (f" ({words})" if words else "")
        lines.append((_clock(str(entry["time"])), str(entry["level"]), text))
    return lines[-LOG_LINES:]


def _clock(stamp: str) -> str:
    """The local time of day."""
    try:
        return f"{datetime.fromisoformat(stamp).astimezone():%H:%M:%S}"
    except ValueError:
        return ""


def member_view(folder: Path, status: Callable[[], dict[str, Any]], shared: Sequence[str]) -> LiveView:
    """What a member shows on its own machine: where it stands, and only such metrics as it shares."""

    def members(_: Sequence[RunRecord]) -> list[Member]:
        told = status()
        clients = told.get("clients") or {}
        return [
            Member.of_status(told),
            *(
                Member(name, seen["round"], told["rounds"], f"seen {seen['seconds_ago']:.0f} s ago")
                for name, seen in clients.items()
            ),
        ]

    def hidden(metric: str) -> bool:
        return metric not in shared and metric not in MEMBER_COLUMNS

    following = Following(lambda: [folder] if is_run(folder) else [], hidden)
    return LiveView(following, members, name=status()["name"])
