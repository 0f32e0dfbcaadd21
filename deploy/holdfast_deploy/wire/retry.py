"""Waiting for another member: again and again, until the answer is there or the limit is reached."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.core.errors import REFUSED, TRY_LATER, HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import NO_ROOM
from holdfast_deploy.storage.links import ForgedError, MixedRunsError
from holdfast_deploy.storage.messages import DamagedError
from holdfast_deploy.wire.dial import Unreachable
from holdfast_deploy.wire.protocol import PATIENCE, Kind, RefusedError

JITTER = random.Random()  # the global generator may be seeded for the transforms of a data set
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts

T = TypeVar("T")


class WaitLimitError(HoldfastError):
    """A neighbour was waited for in vain; the member can be started again."""

    exit_code = TRY_LATER


class RefusedForGoodError(HoldfastError):
    """Another member will never give what was asked for: going on together is impossible."""

    exit_code = REFUSED


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


class Link(Protocol):
    """What waiting has to know of the way to a peer."""

    peer: str
    events: Events
    waits: dict[str, Wait]  # those under way, by peer
    round: int  # where the peer is, as far as we know
    retries: int


async def retry(link: Link, attempt: Callable[[], Awaitable[T | None]], limit: float) -> T:
    """Repeats ``attempt`` until it gives something, for ``limit`` seconds.

    The limit counts from the beginning, or from when the peer was first heard to be a round further.
    Pieces of a message do not extend it: in time is what is complete in time.
    """
    wait = link.waits[link.peer] = Wait(link.peer, time.monotonic())
    known_round, pause = link.round, SHORTEST_PAUSE
    deadline = wait.since + limit
    try:
        while True:
            begun = time.monotonic()
            try:
                async with asyncio.timeout(deadline - begun) as overall:
                    result = await attempt()
                if result is not None:
                    return result
                wait.problem = ""
            except RefusedError as error:
                if error.kind is Kind.FORGED:
                    raise ForgedError(f"{link.peer} says: {error}") from None
                if error.kind is Kind.FOR_GOOD:
                    raise RefusedForGoodError(f"{link.peer} refuses: {error}") from None
                wait.problem = str(error)
                if error.kind is Kind.DISAGREE:  # which waiting alone does not mend
                    link.events.complain("refused by", peer=link.peer, reason=wait.problem)
            except Unreachable as error:
                wait.problem = str(error)
            except TimeoutError:
                wait.problem = wait.problem if overall.expired() else "it fell silent"
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                wait.problem = str(error.strerror)
                link.events.complain("no room, waiting", reason=wait.problem, peer=link.peer)
            except (MixedRunsError, ForgedError, DamagedError):
                raise
            except HoldfastError as error:
                wait.problem = str(error)
                link.events.complain("a message was refused", peer=link.peer, reason=str(error))
            now = time.monotonic()
            if link.round > known_round:
                deadline, known_round = now + limit, link.round
            if now >= deadline:
                raise WaitLimitError(
                    f"{wait}; that is the limit (limits.wait). Everything is saved: start the same "
                    "command again to go on"
                )
            if wait.problem or now - begun < PATIENCE / 2:
                link.retries += 1
                await asyncio.sleep(min(pause * JITTER.uniform(0.5, 1.0), deadline - now))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                pause = SHORTEST_PAUSE
    finally:
        link.waits.pop(link.peer, None)
