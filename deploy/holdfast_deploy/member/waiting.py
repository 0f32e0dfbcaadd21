"""How the computing thread waits for the event loop, and how others end its waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar

from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import DiskFull

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - not an error
    """Somebody asked the member to stop; everything is saved."""


class Waiting:
    """What one computing thread waits for; ``stop`` and ``give_up`` may come from any other thread.

    ``limit``: for how many seconds it waits for room on the disk.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, events: Events, limit: float) -> None:
        self.loop, self.events, self.limit = loop, events, limit
        self.stopping = False
        self.failure: Exception | None = None  # why the member cannot continue
        self.seconds = 0.0  # waited so far
        self._future: Future[Any] | None = None

    def run_uninterrupted(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of ``coroutine`` on the event loop; ``stop`` and ``give_up`` do not end it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def run_interruptible(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the coroutine on the event loop; ``stop`` and ``give_up`` end it."""
        before = time.monotonic()
        future: Future[T] = asyncio.run_coroutine_threadsafe(begin(), self.loop)
        self._future = future
        try:
            self._continue()  # looked at last, so that no call of ``stop`` is missed
            return future.result()
        except CancelledError:
            self._continue()
            raise Stopped from None
        finally:
            self._future = None
            future.cancel()
            self.seconds += time.monotonic() - before

    def retry_while_full(self, action: Callable[[], T]) -> T:
        """The result of ``action``; while there is no room for its files, it is tried again."""
        shortage = DiskFull(self.events, self.limit)
        while True:
            try:
                return action()
            except OSError as error:
                self.run_interruptible(partial(shortage.pause, error))

    def stop(self) -> None:
        """Makes the computing thread raise ``Stopped`` when it waits next, or at once if it is waiting."""
        self.stopping = True
        self._interrupt()

    def give_up(self, error: Exception) -> None:
        """Likewise with ``error``; the first one counts."""
        self.failure = self.failure or error
        self._interrupt()

    def _interrupt(self) -> None:
        future = self._future
        if future is not None:
            future.cancel()

    def _continue(self) -> None:
        if self.stopping:
            raise Stopped
        if self.failure is not None:
            raise self.failure
