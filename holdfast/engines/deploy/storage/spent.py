"""``privacy.jsonl``: what a member has released of private data so far, one line before each release.

The file only grows. Going back to an earlier round, or to another epoch, does not take back what others have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.privacy.budget import DP, NodeDP
from holdfast.privacy.ledger import composed_epsilon

Times = dict[tuple[float, float], int]  # of each (noise multiplier, sampling rate)

EVERYBODY = ("",)  # whose data a release is of: the member's own, or those of all nodes alike


class BudgetSpentError(HoldfastError):
    """What would be released next is beyond the budget."""


class Spent:
    """The releases of one member, and their epsilon. ``begun``: whether it has been here before."""

    def __init__(self, path: Path, begun: bool) -> None:
        self.path = path
        self.times: dict[str, Times] = {}  # by whose data were released
        self.known: set[str] = set()  # digests of what was released
        self.draws: dict[str, str] = {}  # what was released from each secret draw
        if not path.exists():
            if begun:
                raise HoldfastError(
                    f"{path} is missing, so nobody knows what was spent of the privacy budget; put it back"
                )
            write_atomic(path, b"")
        *whole, rest = path.read_bytes().split(b"\n")
        if rest:  # a crash interrupted the line, and nothing was sent
            write_atomic(path, b"".join(line + b"\n" for line in whole))
        for number, line in enumerate(whole, 1):
            try:
                self._add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise HoldfastError(f"{path}, line {number} is damaged; put the file back") from None

    def _add(self, entry: dict[str, Any]) -> None:
        self.known.add(entry["release"])
        if "draw" in entry:
            self.draws[str(entry["draw"])] = entry["release"]
        for name in entry.get("nodes", EVERYBODY):
            self.times[name] = _more(self.times.get(name, {}), entry)

    def epsilon(self, delta: float) -> float:
        """What was spent so far, for ``delta``, of the node of which most was."""
        return max((_epsilon(delta, times) for times in self.times.values()), default=0.0)

    def charge(
        self,
        release: str,
        accesses: list[tuple[float, int]],
        multiplier: float,
        budget: DP | NodeDP,
        nodes: Sequence[str] = EVERYBODY,
        draw: str = "",
    ) -> None:
        """Writes down ``accesses``, (sampling rate, how often), before a new ``release`` is sent.

        ``nodes``: whose data it is of. ``draw``: the secret draw of a sample that it is of, which is good for
        one release only: a second of the same sample would cost more than its rate says.
        """
        if release in self.known:
            return
        if draw and draw in self.draws:
            raise HoldfastError(
                "the round was released before, with other messages of the same secret cohort, and a second "
                "release would cost more than is accounted for. Roll everybody back (holdfast federation "
                "rollback): a cohort is then drawn anew"
            )
        entry: dict[str, Any] = {"release": release, "noise_multiplier": multiplier, "accesses": accesses}
        entry |= {"nodes": list(nodes)} if nodes != EVERYBODY else {}
        entry |= {"draw": draw} if draw else {}
        after = [_more(self.times.get(name, {}), entry) for name in nodes]
        if max(_epsilon(budget.delta, times) for times in after) > budget.epsilon:
            raise BudgetSpentError(
                f"the privacy budget is spent: epsilon {self.epsilon(budget.delta):.4g} of "
                f"{budget.epsilon:g} at delta {budget.delta:g}, and another round would exceed it. Nothing "
                "more is sent"
            )
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                file.write(json.dumps(entry).encode() + b"\n")
                os.fsync(file.fileno())
            except OSError:  # no room: it is tried again
                file.truncate(end)
                raise
        self._add(entry)


def _more(times: Times, entry: dict[str, Any]) -> Times:
    after = dict(times)
    for rate, count in entry["accesses"]:
        what = (float(entry["noise_multiplier"]), float(rate))
        after[what] = after.get(what, 0) + int(count)
    return after


def _epsilon(delta: float, times: Times) -> float:
    return composed_epsilon(delta, tuple((*what, count) for what, count in sorted(times.items())))
