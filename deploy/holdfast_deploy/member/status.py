"""Where a member stands, in figures: for its people, and for other members who ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast_deploy.federation import Federation
    from holdfast_deploy.member.base import Member
    from holdfast_deploy.member.server import Server
    from holdfast_deploy.membership.service import MembershipService


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


def status_outside(keeper: MembershipService, since: float) -> dict[str, Any]:
    """Of a member that has not taken part since then (on the event loop's clock): it waits for the others."""
    waiting = round(keeper.loop.time() - since, 1)
    figures = {"waiting_seconds": waiting, "round": 0, "bytes_sent": 0, "bytes_received": 0, "retries": 0}
    return blank_status(keeper.view.log.federation, keeper.name) | {
        "phase": keeper.view.problem or "waiting to be let in",
        "round": keeper.view.log.roster.first,
        "waiting_seconds": waiting,
        "uptime_seconds": waiting,
        "refused": dict(keeper.events.complaints),
        "last_error": keeper.events.last_error,
        "peers": {name: dict(figures) for name in keeper.view.others()},
        "certificate_days": _days_left(keeper),
    }


def _days_left(member: Member | MembershipService) -> float | None:
    return None if member.credentials is None else round(member.credentials.days_left, 1)


def status_of(member: Member) -> dict[str, Any]:
    """Only metrics that the federation file lists are in it."""
    federation, links = member.federation, list(member.links.values())
    waits = "; ".join(str(wait) for wait in list(member.waits.values()))
    sent, received = member.wire_bytes
    shared = {k: v for k, v in member.metrics.items() if k in federation.shared_metrics}
    return blank_status(federation, member.name) | {
        "round": member.done,
        "phase": member.phase if member.phase in ("finished", "starting") else waits or member.phase,
        "payload_bytes": member.payload_bytes,
        "wire_bytes_sent": sent,
        "wire_bytes_received": received,
        "retries": sum(link.retries for link in links),
        "waiting_seconds": round(member.costs.waiting, 3),
        "uptime_seconds": round(time.monotonic() - member.began, 1),
        "refused": dict(member.events.complaints),
        "messages": member.norms.status(),
        "last_error": member.events.last_error,
        "peers": _peers(member),
        "certificate_days": _days_left(member),
        "metrics": shared,
    }


def status_of_server(server: Server) -> dict[str, Any]:
    """Where the clients are, and what was spent of a privacy budget of whole nodes."""
    now, rounds = server.network.loop.time(), server.federation.rounds
    clients = {
        name: {"round": min(max(message_round - 1, 0), rounds), "seconds_ago": round(now - when, 1)}
        for name, (when, message_round) in dict(server.service.seen).items()
    }
    spent = {} if server.privacy is None else {"epsilon": round(server.privacy.releases.epsilon, 4)}
    return {"clients": clients, **spent}


def hidden_from_others(server: Server) -> dict[str, Any]:
    """What stands in the place of all that depends on private messages, or on who is in a secret cohort."""
    if server.privacy is None:
        return {}
    hidden: dict[str, Any] = {"messages": {}, "last_error": ""}
    if server.federation.secret_cohorts:
        counts = ("payload_bytes", "wire_bytes_sent", "wire_bytes_received", "retries", "waiting_seconds")
        hidden |= {"phase": server.phase, "refused": {}, "peers": {}, "clients": {}}
        hidden |= dict.fromkeys(counts, 0)
    return hidden


def _peers(member: Member) -> dict[str, dict[str, Any]]:
    """By peer: for how long it has been waited for, where it is, and what went over the link."""
    links, waits, now = dict(member.links), dict(member.waits), time.monotonic()
    seen = {name: message_round for name, (_, message_round) in dict(member.service.seen).items()}
    told: dict[str, dict[str, Any]] = {}
    for name in sorted(links.keys() | waits.keys() | seen.keys()):
        link = links.get(name)
        told[name] = {
            "waiting_seconds": round(now - waits[name].since, 1) if name in waits else 0.0,
            "round": max(link.round if link else 0, seen.get(name, 0)),
            "bytes_sent": link.bytes_sent if link else 0,
            "bytes_received": link.bytes_received if link else 0,
            "retries": link.retries if link else 0,
        }
    return told
