"""``privacy.jsonl``: what a member has released of private data so far, one line before each release.

The file only grows: going back to an earlier round or to another roster does not take back what others have.
Each line ends with a hash of itself and of the one before, so that a changed or missing line shows.

A secret sample may be released more than once: a round that is computed again after a crash draws the same
one, and if digits differ, as on some devices, with other noise. Whoever has k releases with noise sigma knows
as much as with their mean, whose noise is sigma over the root of k: k of them cost as one with that noise, at
the rate of the sample. That is more than k releases of k samples cost.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import whole_lines, write_atomic
from holdfast.privacy.budget import DP, Accountant, NodeDP
from holdfast.privacy.ledger import composed_epsilon
from holdfast_deploy.storage.messages import DamagedError, put

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
        self.drawn: dict[str, Counter[int]] = {}  # how often each sample of a secret draw was released
        self._hash = ""  # of the last line
        if not path.exists():
            if begun:
                raise DamagedError(
                    f"{path} is missing, so nobody knows what was spent of the privacy budget; put it back"
                )
            write_atomic(path, b"")
        content = path.read_bytes()
        whole = whole_lines(content)
        if whole != content:  # a crash interrupted the line, and nothing was sent
            write_atomic(path, whole)
        else:  # who was killed before the sync has sent nothing either, but now it may be sent
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                told, self._hash = entry.pop("hash"), self._hashed(entry)
                self._add(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                told = None
            if told != self._hash:
                raise DamagedError(f"{path}, line {number} is damaged; put the file back")

    def _hashed(self, entry: dict[str, Any]) -> str:
        """Of ``entry`` and all before it."""
        return hashlib.sha256((self._hash + json.dumps(entry)).encode()).hexdigest()

    def _add(self, entry: dict[str, Any]) -> None:
        self.known.add(entry["release"])
        after = {name: self._after(name, entry) for name in entry.get("nodes", EVERYBODY)}
        self.times |= after
        if "draw" in entry:
            self.drawn.setdefault(entry["draw"], Counter()).update(_samples(entry))

    def _after(self, name: str, entry: dict[str, Any]) -> Times:
        """What is released of the data of ``name`` with ``entry``."""
        drawn, after = self.drawn.get(entry.get("draw", ""), Counter()), Counter(self.times.get(name, {}))
        sigma = float(entry["noise_multiplier"])
        for rate, count in entry["accesses"]:
            before = Counter([0] * int(count))
            if rate < 1:
                before = Counter(drawn[sample] for sample in _samples(entry))
            for times, samples in before.items():
                after[sigma / math.sqrt(times + 1), float(rate)] += samples
                if times:  # which were charged as so many releases
                    after[sigma / math.sqrt(times), float(rate)] -= samples
        return dict(after)

    def epsilon(self, delta: float, accountant: Accountant = "pld") -> float:
        """What was spent so far, for ``delta``, of the node of which most was."""
        return max((_epsilon(delta, times, accountant) for times in self.times.values()), default=0.0)

    def charge(
        self,
        release: str,
        accesses: list[tuple[float, int]],
        multiplier: float,
        budget: DP | NodeDP,
        nodes: Sequence[str] = EVERYBODY,
        draw: str = "",
        first: int = 0,
    ) -> bool:
        """Writes down ``accesses``, (sampling rate, how often), before a new ``release`` is sent.

        ``nodes``: whose data it is of. ``draw``: the secret draw of samples, of which those from the number
        ``first`` on are accessed, where the rate is below one. Returns whether some of them were before.
        """
        if release in self.known:
            return False
        entry: dict[str, Any] = {"release": release, "noise_multiplier": multiplier, "accesses": accesses}
        entry |= {"nodes": list(nodes)} if nodes != EVERYBODY else {}
        entry |= {"draw": draw, "first": first} if draw else {}
        after = [self._after(name, entry) for name in nodes]
        if max(_epsilon(budget.delta, times, budget.accountant) for times in after) > budget.epsilon:
            before = self.epsilon(budget.delta, budget.accountant)
            raise BudgetSpentError(
                f"the privacy budget is spent: epsilon {before:.4g} of {budget.epsilon:g} at delta "
                f"{budget.delta:g}, and another round would exceed it. Nothing more is sent"
            )
        hashed = self._hashed(entry)
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                put(file, json.dumps(entry | {"hash": hashed}).encode() + b"\n")
                os.fsync(file.fileno())
            except OSError:  # no room: it is tried again
                file.truncate(end)
                raise
        self._hash = hashed
        again = any(self.drawn.get(draw, Counter())[sample] for sample in _samples(entry))
        self._add(entry)
        return again


def _samples(entry: dict[str, Any]) -> range:
    """The numbers of the samples of its draw that ``entry`` releases."""
    first = int(entry.get("first", 0))
    return range(first, first + sum(int(count) for rate, count in entry["accesses"] if rate < 1))


def _epsilon(delta: float, times: Times, accountant: Accountant) -> float:
    mechanisms = tuple((*what, count) for what, count in sorted(times.items()))
    return composed_epsilon(delta, mechanisms, accountant)
