"""``privacy.jsonl``: what a node has released of its data so far, one line before each release.

The file only grows. Going back to an earlier round, or to another epoch, does not take back what others have.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.privacy.budget import DP
from holdfast.privacy.ledger import composed_epsilon


class BudgetSpentError(HoldfastError):
    """What would be released next is beyond the budget."""


class Spent:
    """The releases of one node, and their epsilon. ``begun``: whether the node has been here before."""

    def __init__(self, path: Path, begun: bool) -> None:
        self.path = path
        self.times: dict[tuple[float, float], int] = {}  # of each (noise multiplier, sampling rate)
        self.known: set[str] = set()  # digests of what was released
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
        for rate, times in entry["accesses"]:
            what = (float(entry["noise_multiplier"]), float(rate))
            self.times[what] = self.times.get(what, 0) + int(times)

    def epsilon(self, delta: float) -> float:
        """What was spent so far, for ``delta``."""
        return _epsilon(delta, self.times)

    def charge(self, release: str, accesses: list[tuple[float, int]], multiplier: float, budget: DP) -> None:
        """Writes down ``accesses``, (sampling rate, how often), before a new ``release`` is sent."""
        if release in self.known:
            return
        entry = {"release": release, "noise_multiplier": multiplier, "accesses": accesses}
        after = dict(self.times)
        for rate, times in accesses:
            after[multiplier, rate] = after.get((multiplier, rate), 0) + times
        if _epsilon(budget.delta, after) > budget.epsilon:
            raise BudgetSpentError(
                f"the privacy budget is spent: epsilon {self.epsilon(budget.delta):.4g} of "
                f"{budget.epsilon:g} at delta {budget.delta:g}, and another round would exceed it. Nothing "
                "more is sent"
            )
        with self.path.open("ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._add(entry)


def _epsilon(delta: float, times: dict[tuple[float, float], int]) -> float:
    return composed_epsilon(delta, tuple((*what, count) for what, count in sorted(times.items())))
