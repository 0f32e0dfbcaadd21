"""Waiting for another member, and its two ends without an answer."""

from __future__ import annotations

import time
from dataclasses import dataclass

from holdfast.core.errors import HoldfastError


class WaitLimitError(HoldfastError):
    """A neighbour was waited for in vain; the member can be started again."""


class RefusedForGoodError(HoldfastError):
    """Another member will never give what was asked for: going on together is impossible."""


@dataclass
class Wait:
    """Who is waited for, since when, and what the matter is."""

    peer: str
    since: float
    problem: str = ""

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        passed = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"waiting for {self.peer} ({passed})" + (f": {self.problem}" if self.problem else "")
