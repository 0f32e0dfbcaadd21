"""How the computing thread waits for the event loop, and how others end its waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818 - not an error
    """Somebody asked the member to stop; everything is saved."""


class Waiting:
    """What one computing thread waits for; ``stop`` and ``give_up`` may come from any other thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.stopping = False
        self.failure: Exception | None = None  # why the member cannot go on
        self._future: Future[Any] | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What ``coroutine`` gives on the event loop, whatever others want meanwhile."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def run_on_loop(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine gives on the event loop, unless somebody ends the waiting for it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(begin(), self.loop)
        self._future = future
        try:
            self._go_on()  # looked at last, so that no call of ``stop`` is missed
            return future.result()
        except CancelledError:
            self._go_on()
            raise Stopped from None
        finally:
            self._future = None
            future.cancel()

    def stop(self) -> None:
        """Makes the computing thread raise ``Stopped`` when it asks next, or at once if it is waiting."""
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

    def _go_on(self) -> None:
        if self.stopping:
            raise Stopped
        if self.failure is not None:
            raise self.failure
