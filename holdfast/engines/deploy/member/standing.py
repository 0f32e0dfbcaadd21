"""Where a member stands, in figures: for its people, and for other members who ask."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.engines.deploy.member.base import Member


def status_of(member: Member) -> dict[str, Any]:
    """Only metrics that the federation file lists are in it."""
    federation, links = member.federation, list(member.links.values())
    waits = "; ".join(str(wait) for wait in list(member.waits.values()))
    sent, received = member.wire_bytes
    shared = {k: v for k, v in member.metrics.items() if k in federation.shared_metrics}
    days = None if member.credentials is None else round(member.credentials.days_left, 1)
    return {
        "name": member.name,
        "federation": federation.id,
        "epoch": federation.epoch,
        "round": member.done,
        "rounds": federation.rounds,
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
        "wait_limit": federation.limits.wait,
        "peers": _peers(member),
        "certificate_days": days,
        "metrics": shared,
    }


def _peers(member: Member) -> dict[str, dict[str, Any]]:
    """By peer: for how long it has been waited for, where it is, and what went over the link."""
    links, waits, now = dict(member.links), dict(member.waits), time.monotonic()
    seen = {name: stage for name, (_, stage) in dict(member.service.seen).items()}
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
