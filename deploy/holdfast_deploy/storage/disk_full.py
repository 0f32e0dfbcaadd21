"""When the machine runs out of open files or of disk space, a member waits for room instead of ending."""

from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from holdfast.core.errors import DAMAGED, TRY_LATER, HoldfastError
from holdfast_deploy.ops.events import Events

NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT})
PAUSE = 1.0  # seconds between attempts

T = TypeVar("T")


class NoRoomError(HoldfastError):
    """The machine was out of disk space or open files for too long; the member can be started again."""

    exit_code = TRY_LATER


class FileGoneError(HoldfastError):
    """A file, or a folder, that a running member needs is not there any more."""

    exit_code = DAMAGED


def explained(error: OSError) -> HoldfastError:
    """``error``, which ends a member, with what people can do about it."""
    again = "and start the same command again"
    if error.errno in NO_ROOM:
        return NoRoomError(f"{error}: free some disk space, or allow more open files (ulimit -n), {again}")
    if isinstance(error, FileNotFoundError):
        return FileGoneError(
            f"{error.filename} was taken away while the member ran: put it back if you can, {again}"
        )
    return HoldfastError(f"{error}: see what keeps the member from its files, {again}")


def raise_file_limit() -> int:
    """Raises the limit of open files as far as this process may; the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS announces no hard limit, and refuses "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit


async def retry_while_full(action: Callable[[], T], events: Events, limit: float) -> T:
    """What ``action`` gives; while there is no room for its files, it is tried again from the start."""
    shortage = DiskFull(events, limit)
    while True:
        try:
            return action()
        except OSError as error:
            await shortage.pause(error)


class DiskFull:
    """One operation without room for its files: it warns, pauses, and gives up after ``limit`` seconds."""

    def __init__(self, events: Events, limit: float) -> None:
        self.events, self.limit = events, limit
        self.since: float | None = None

    async def pause(self, error: OSError) -> None:
        """Waits a moment after ``error``; raises it if it is of another kind."""
        if error.errno not in NO_ROOM:
            raise error
        self.events.complain("no room, waiting", reason=str(error.strerror), file=str(error.filename or ""))
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if now - self.since > self.limit:
            raise NoRoomError(
                f"{error.strerror}: waited for room as long as limits.wait allows. Everything is saved: free "
                "some disk space, or allow more open files (ulimit -n), and start the same command again"
            ) from None
        await asyncio.sleep(min(PAUSE, self.limit))
