"""What goes into a member's record: figures and costs by round, and how its run ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_json
from holdfast.engines.common.counters import Work
from holdfast_deploy.member.base import Member
from holdfast_deploy.member.waiting import Stopped
from holdfast_deploy.storage.results import Status, digests

T = TypeVar("T")


def record_round(member: Member, done: int, work: Work, links: int) -> None:
    """Records the latest figures, and what ``done`` rounds have cost; ``links``: to others."""
    sent, received = member.wire_bytes
    wire = {
        "wire_bytes_sent": sent,
        "wire_bytes_received": received,
        "waiting_seconds": round(member.costs.waiting, 3),
    }
    costs = {
        "payload_bytes": member.payload_bytes,
        "payload_bytes_per_link": member.payload_bytes / max(links, 1),
        "gradient_evaluations": work.gradient_evaluations,
        "sample_gradients": work.sample_gradients,
        "seconds": round(member.seconds, 3),
    }
    member.retry_while_full(lambda: member.record.add(done, member.metrics | wire, costs))
    member.retry_while_full(lambda: member.record.conclude("running", done, member.seconds))


def write_report(member: Member, models: Iterable[str] = ()) -> None:
    """``report.json``: what taking part has cost, for the member's own people, and its own figures.

    ``models``: under which names its models are written; what they are like goes in as well.
    """
    costs = member.costs
    report = member.status() | {
        "seconds": round(costs.seconds, 3),
        "saving_seconds": round(costs.saving, 3),
        "compute_seconds": round(costs.seconds - costs.waiting - costs.saving, 3),
        "delivery_bytes": costs.delivery_bytes,
        "metrics": member.metrics,
        "models": digests(member.folder, models),
    }
    member.retry_while_full(lambda: write_json(member.folder / "report.json", report))


def recorded(member: Member, run: Callable[[], T]) -> T:
    """``run``; what becomes of it goes into the record."""
    try:
        result = run()
    except (Stopped, HoldfastError) as error:
        status: Status = "interrupted" if isinstance(error, Stopped) else "failed"
        with suppress(OSError):  # that may be what it failed for
            member.record.conclude(status, member.done, member.seconds, str(error))
        raise
    member.retry_while_full(lambda: member.record.conclude("done", member.done, member.seconds))
    return result
