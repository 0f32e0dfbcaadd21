"""A run that goes on to more rounds than it began with, and ends like one that was given them at first."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.experiments.plan import Plan


def planned_rounds(summary: Mapping[str, Any]) -> int:
    """The rounds that the run of ``summary`` was begun with, or extended to."""
    return int(summary["jobs"][0]["rounds"])


def is_extension(plan: Plan, summary: Mapping[str, Any]) -> bool:
    """Whether ``plan`` is the run of ``summary`` with more rounds, and with nothing else changed."""
    before = planned_rounds(summary)
    now = {job.rounds for job in plan.jobs}
    if now == {before} or plan.at_rounds(before).origin.changes(summary):
        return False
    if max(now) < before:
        raise HoldfastError(
            f"rounds: the run has {before} rounds already, got {max(now)}; give more, or as many"
        )
    for job in plan.jobs:
        if plan.setting(job).objective.private is not None:
            raise HoldfastError(
                f"rounds: the noise of a private run is chosen for all its rounds, here {before}; "
                "start a new run for more"
            )
    return True


def extended(plan: Plan, summary: Mapping[str, Any]) -> dict[str, Any]:
    """``summary`` with the rounds of ``plan``: what was done goes on, what a callback stopped stays so."""
    new = deepcopy(dict(summary))
    for entry, job in zip(new["jobs"], plan.jobs, strict=True):
        entry["rounds"] = job.rounds
        if entry["status"] == "done" or entry.pop("growing", False):
            entry["status"] = "interrupted"
            entry.pop("message", None)
    earlier = [*summary.get("earlier_digests", []), summary["digest"]]
    new |= {"status": "interrupted", "digest": plan.digest, "earlier_digests": earlier}
    return {**new, **plan.origin.notes}
