"""Where a member stands, in figures: for its people, and for other members who ask."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.service import MembershipService
from holdfast_deploy.wire.client import Connection
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.retry import Wait


def blank_status(federation: Federation, name: str) -> dict[str, Any]:
    """Of a process that has just begun."""
    nothing = ("round", "payload_bytes", "wire_bytes_sent", "wire_bytes_received", "retries")
    return {
        "name": name,
        "federation": federation.id,
        "roster": federation.roster_number,
        "rounds": federation.rounds,
        "phase": "starting",
        **dict.fromkeys(nothing, 0),
        "waiting_seconds": 0.0,
        "uptime_seconds": 0.0,
        "refused": {},
        "messages": {},
        "last_error": "",
        "wait_limit": federation.limits.wait,
        "peers": {},
        "certificate_days": None,
        "metrics": {},
    }


def status_outside(service: MembershipService, since: float) -> dict[str, Any]:
    """Of a member that has not taken part since then (on the event loop's clock): it waits for the others."""
    waiting = round(service.loop.time() - since, 1)
    figures = {"waiting_seconds": waiting, "round": 0, "bytes_sent": 0, "bytes_received": 0, "retries": 0}
    return blank_status(service.view.log.federation, service.name) | {
        "phase": service.view.problem or "waiting to be let in",
        "round": service.view.log.roster.first,
        "waiting_seconds": waiting,
        "uptime_seconds": waiting,
        "refused": dict(service.events.complaints),
        "last_error": service.events.last_error,
        "peers": {name: dict(figures) for name in service.view.others()},
        "certificate_days": days_left(service.credentials),
    }


def days_left(credentials: Credentials | None) -> float | None:
    """For how long the certificate is valid; None: there is none."""
    return None if credentials is None else round(credentials.days_left, 1)


def client_figures(seen: Mapping[str, tuple[float, int]], now: float, rounds: int) -> dict[str, Any]:
    """Where a server's clients are: ``seen`` says when each asked last, for which message round."""
    return {
        name: {"round": min(max(message_round - 1, 0), rounds), "seconds_ago": round(now - when, 1)}
        for name, (when, message_round) in dict(seen).items()
    }


def peer_figures(
    links: Mapping[str, Connection], waits: Mapping[str, Wait], seen: Mapping[str, tuple[float, int]]
) -> dict[str, dict[str, Any]]:
    """By peer: for how long it has been waited for, where it is, and what went over the link."""
    links, waits, now = dict(links), dict(waits), time.monotonic()
    asked = {name: message_round for name, (_, message_round) in dict(seen).items()}
    figures: dict[str, dict[str, Any]] = {}
    for name in sorted(links.keys() | waits.keys() | asked.keys()):
        link = links.get(name)
        figures[name] = {
            "waiting_seconds": round(now - waits[name].since, 1) if name in waits else 0.0,
            "round": max(link.round if link else 0, asked.get(name, 0)),
            "bytes_sent": link.bytes_sent if link else 0,
            "bytes_received": link.bytes_received if link else 0,
            "retries": link.retries if link else 0,
        }
    return figures
