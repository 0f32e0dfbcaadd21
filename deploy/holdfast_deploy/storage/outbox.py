"""What a member has published: written before it can be fetched, kept until nobody will ask for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import (
    HANDED_OVER,
    DamagedError,
    Header,
    MessageFile,
    digest,
    write_message,
)
from holdfast_deploy.storage.store import Store, message_key, message_name, remove

OutboxKey = tuple[int, int, str]  # message round, exchange, recipient ("" for all)


class Outbox:
    """Published messages. ``publish`` and ``prune`` belong to the computing thread, the rest to the loop."""

    def __init__(self, store: Store, events: Events, loop: asyncio.AbstractEventLoop) -> None:
        self.store, self.events, self.loop = store, events, loop
        self.floors: dict[str, int] = {}  # the lowest round that each peer may still ask for
        self.messages: dict[OutboxKey, MessageFile] = {}
        self.lost: set[int] = set()  # rounds of which a message is to be computed again
        self._changed = asyncio.Event()
        self._losing = threading.Lock()  # a damaged message is found by both threads, perhaps at once
        for path in sorted(store.outbox.iterdir()):
            key = message_key(path.name)
            try:
                self.messages[key] = store.own(path, store.identity["name"], key[:2])
            except DamagedError as error:
                self._lose(key, error)

    def lose(self, message: MessageFile, error: DamagedError) -> bool:
        """A published message is damaged: nobody is to have it, and it has to be computed again.

        Whoever finds out second changes nothing, since it may have been computed again. Returns whether
        this was the first.
        """
        key = message_key(message.path.name)
        with self._losing:
            first = self.messages.get(key) is message
            if first:
                self._lose(key, error)
        return first

    def _lose(self, key: OutboxKey, error: DamagedError) -> None:
        self.events.complain("a published message is damaged", reason=str(error), round=key[0])
        self.lost.add(key[0])  # before it is gone, so that no peer hears that it is gone for good
        self.messages.pop(key, None)
        remove(self.store.outbox / message_name(*key))

    def publish(self, header: Header, tree: Any, recipient: str = "") -> MessageFile:
        """Writes the message and lets it be fetched; once published, it stays as it was."""
        key = (header.round, header.exchange, recipient)
        path = self.store.outbox / message_name(*key)
        with self._losing:  # one that is being lost is gone, and its file with it
            message = self.messages.get(key)
        if message is None:
            message = self.messages[key] = write_message(path, header, tree)
            self.loop.call_soon_threadsafe(self.wake)
        else:  # after a crash: the round is computed again, and should give the same
            if digest(tree) != message.header.content:
                self.events.complain("computed again, a published message differs", round=header.round)
        return message

    def withdraw(self, round: int) -> None:
        """Takes back the messages of a round that does not count."""
        for key in [key for key in list(self.messages) if key[0] == round]:
            self.messages.pop(key, None)
            remove(self.store.outbox / message_name(*key))

    def wake(self) -> None:
        """Lets all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout: float) -> bool:
        """Waits for something new, at most so many seconds."""
        try:
            await asyncio.wait_for(self._changed.wait(), max(timeout, 0.0))
        except TimeoutError:
            return False
        return True

    async def find(self, round: int, exchange: int, recipient: str, patience: float) -> MessageFile | None:
        """The message for ``recipient``, once it is published; None if that takes too long."""
        until = self.loop.time() + patience
        while True:
            for addressee in (recipient, ""):
                message = self.messages.get((round, exchange, addressee))
                if message is not None:
                    return message
            if not await self.changed(until - self.loop.time()):
                return None

    def raise_floor(self, peer: str, round: int) -> None:
        """``peer`` asks for ``round``, and so acknowledges that it has saved all rounds before."""
        if round > self.floors.get(peer, 0):
            self.floors[peer] = round
            self.wake()

    def prune(self, below: int, recipients: Callable[[int], list[str]]) -> None:
        """Forgets messages of rounds before ``below`` that nobody will ask for.

        ``recipients`` says which members are to have what is sent to all in a round. A model for those who
        join is kept: they may come late.
        """
        for key in [key for key in list(self.messages) if key[0] < below and key[1] != HANDED_OVER]:
            wanted_by = [key[2]] if key[2] else recipients(key[0])
            if all(self.floors.get(peer, 0) > key[0] for peer in wanted_by):
                self.messages.pop(key, None)
                remove(self.store.outbox / message_name(*key))
        for round, exchange, peer in self.store.decided():
            if round + 1 < min(below, self.floors.get(peer, 0)):  # a peer may compute its last round again
                self.store.forget_decision(round, exchange, peer)
