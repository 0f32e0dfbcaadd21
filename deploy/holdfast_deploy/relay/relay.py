"""The relay: members dial it, and it hands sealed parcels from one to the other.

It keeps parcels in memory only, a few for each pair of members. Whatever gets lost with it, or is refused for
lack of room, is asked for again: a member that asks repeats its question until it has the whole answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay.parcels import RELAY_SERVICE, Address, CardAsk, Hello, Parcel, stamp
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.listening import caller_name, serve_calls, shown_by
from holdfast_deploy.wire.protocol import LARGEST_FRAME, PATIENCE, SILENCE, Pieces, take_first
from holdfast_deploy.wire.service import MOST_STRANGERS
from holdfast_deploy.wire.vigil import watch_certificates

Code = grpc.StatusCode

PAIR = 8 * LARGEST_FRAME  # bytes that may wait from one member to another
# Of one member that may be connected: the node itself, twice where members may change, what it was in the
# roster before or before a crash, and people who ask for its status.
PROCESSES = 8
CALLS = 256  # of one member at a time
HOLD = 60.0  # seconds that what comes for a process is kept after its connection broke


@dataclass
class Box:
    """What waits for one process of a member."""

    waiting: deque[tuple[str, bytes]] = field(default_factory=deque)
    held: Counter[str] = field(default_factory=Counter)  # bytes, by sender
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reader: int = 0  # the newest connection; the ones before end
    left: float | None = None  # when the last connection ended; None: there is one
    scope: str = ""
    card: bytes = b""
    senders: set[tuple[str, str]] = field(default_factory=set)  # processes that have sent something here

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def put(self, sender: str, content: bytes) -> None:
        """Waits for room."""
        while self.held[sender] + len(content) > PAIR:
            await self.changed.wait()
        self.waiting.append((sender, content))
        self.held[sender] += len(content)
        self.wake()

    async def get(self, reader: int) -> bytes | None:
        """The next parcel; None when another connection has taken over."""
        while not self.waiting and reader == self.reader:
            await self.changed.wait()
        if reader != self.reader:
            return None
        sender, content = self.waiting.popleft()
        self.held[sender] -= len(content)
        self.wake()
        return content

    def take_over(self) -> int:
        """A new connection reads from here on; its number."""
        self.reader, self.left = self.reader + 1, None
        self.wake()
        return self.reader


class Relay:
    """Passes parcels between the members of one federation; ``serve`` begins, ``close`` ends it."""

    def __init__(self, federation: Federation, events: Events) -> None:
        self.members, self.events = {member.name for member in federation.members}, events
        self.name = "" if federation.relay is None else federation.relay.name
        self.changing = federation.membership is not None
        self.coordinator = federation.coordinator
        self.credentials: Credentials | None = None
        self.boxes: dict[str, dict[str, Box]] = defaultdict(dict)  # by member, by process
        self.calls: Counter[str] = Counter()
        self._under_way: Counter[tuple[str, bytes, str]] = Counter()  # who, its certificate, its connection
        self.parcels = self.bytes = 0  # passed on so far
        self._arrived = asyncio.Event()  # somebody with a card

    async def serve(self, address: str, credentials: Credentials) -> int:
        """Listens on ``address``; the port."""
        self.credentials = credentials
        answers = {"Card": self.card, "Send": self.send}
        self._server, port, self._door = await serve_calls(
            address,
            credentials,
            self.receive,
            answers,
            MOST_STRANGERS + CALLS * len(self.members),
            self.events,
            service=RELAY_SERVICE,
            streams=CALLS,
            streaming="Receive",
        )
        watch = watch_certificates(credentials, self.coordinator, self.events, self._drop_revoked)
        self._keeping = [asyncio.create_task(task) for task in (self._door.keep(port), watch)]
        return port

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await self._server.stop(0)

    # --- the questions ------------------------------------------------------------------------------------

    async def card(self, frames: Pieces, context: Any) -> bytes:
        """The card of a member that answers questions, as soon as it is connected; b"" if that takes long."""
        async with self._call(context):
            ask: CardAsk = parse(CardAsk, await take_first(frames))
            until = time.monotonic() + PATIENCE
            while not (card := self._card(ask.of, ask.scope)) and time.monotonic() < until:
                arrived = self._arrived
                try:
                    await asyncio.wait_for(arrived.wait(), until - time.monotonic())
                except TimeoutError:
                    break
            return card

    def _card(self, name: str, scope: str) -> bytes:
        self._sweep(name)
        found = [box.card for box in self.boxes.get(name, {}).values() if box.card and box.scope == scope]
        return found[-1] if found else b""

    async def receive(self, frames: Pieces, context: Any) -> AsyncGenerator[bytes, None]:
        """All that comes for the caller's process, for as long as it stays connected."""
        async with self._call(context) as who:
            hello: Hello = parse(Hello, await take_first(frames))
            boxes = self.boxes[who]
            box = boxes.pop(hello.instance, None) or Box()
            self._sweep(who)
            others = [i for i, box in boxes.items() if box.card and box.scope == hello.scope]
            for instance in others if hello.card else []:
                self._drop(who, instance)  # that process has ended: a member answers from one at a time
            while len(boxes) >= PROCESSES:  # those that have gone make room first, then those that only ask
                self._drop(who, min(boxes, key=lambda i: (boxes[i].left is None, bool(boxes[i].card))))
            boxes[hello.instance], box.card, box.scope = box, hello.card.encode(), hello.scope
            reader = box.take_over()
            self._arrived.set()
            self._arrived = asyncio.Event()
            yield b""  # connected
            try:
                while (content := await box.get(reader)) is not None:
                    self.parcels, self.bytes = self.parcels + 1, self.bytes + len(content)
                    yield content
            finally:
                if box.reader == reader:
                    box.left = time.monotonic()

    async def send(self, frames: Pieces, context: Any) -> bytes:
        """Parcels for one process of another member, one after the other."""
        async with self._call(context) as who:
            address: Address = parse(Address, await take_first(frames))
            async for parcel in frames:
                self._sweep(address.to)
                box = self.boxes.get(address.to, {}).get(address.instance)
                if box is None:
                    await context.abort(Code.UNAVAILABLE, f"{address.to} is not connected to the relay")
                    raise AssertionError  # abort does not return
                try:
                    if address.sender in self.boxes.get(who, {}):  # else there is nobody to tell anything
                        box.senders.add((who, address.sender))
                    async with asyncio.timeout(SILENCE):
                        await box.put(who, stamp(who, address.sender, parcel))
                except TimeoutError:
                    await context.abort(Code.UNAVAILABLE, f"{address.to} takes nothing from the relay")
            return b""

    # --- who asks -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _call(self, context: Any) -> AsyncIterator[str]:
        who, shown = caller_name(context, secure=True), shown_by(context)
        if (reason := self._unwelcome(who, shown)) is not None:
            await self._refuse(context, who, Code.PERMISSION_DENIED, reason)
        if self.calls[who] >= CALLS:
            await self._refuse(context, who, Code.RESOURCE_EXHAUSTED, "too many calls at a time")
        self.calls[who] += 1
        call = (who, shown, context.peer())
        self._under_way[call] += 1
        try:
            yield who
        except HoldfastError as error:
            await self._refuse(context, who, Code.INVALID_ARGUMENT, str(error))
        finally:
            self.calls[who] -= 1
            self._under_way -= Counter([call])

    def _drop_revoked(self) -> None:
        """Ends the connections of callers whose certificates hold no longer."""
        for who, shown, connection in list(self._under_way):
            if (reason := self._unwelcome(who, shown)) is not None:
                self.events.complain("refused", peer=who, reason=reason)
                self._door.drop(connection)

    def _unwelcome(self, who: str, shown: bytes) -> str | None:
        """Why ``who`` may not use the relay; None: it may.

        Where members may change, everybody may who has a certificate of the federation's authority: the relay
        does not know who takes part by now, and members talk to nobody else.
        """
        if who not in self.members and (not self.changing or who in ("", self.name)):
            return "not a member of the federation"
        try:
            if self.credentials is not None:
                self.credentials.check(who, shown)
        except HoldfastError as error:
            return str(error)
        return None

    async def _refuse(self, context: Any, who: str, code: grpc.StatusCode, reason: str) -> None:
        self.events.complain("refused", peer=who[:80] or "somebody", reason=reason)
        await context.abort(code, reason)

    def _sweep(self, name: str) -> None:
        """Forgets processes whose connections broke a while ago."""
        now, boxes = time.monotonic(), self.boxes.get(name, {})
        for instance in [i for i, box in boxes.items() if box.left is not None and now - box.left > HOLD]:
            self._drop(name, instance)

    def _drop(self, name: str, instance: str) -> None:
        """Forgets a process, and tells those who may wait for its answers."""
        box = self.boxes[name].pop(instance)
        for other in [other for boxes in self.boxes.values() for other in boxes.values()]:
            other.senders.discard((name, instance))
        notice = stamp(name, instance, Parcel(0, 0, b"", gone=True).pack())
        for sender, process in box.senders:
            waiting = self.boxes[sender].get(process)
            if waiting is not None:
                waiting.waiting.append((name, notice))
                waiting.held[name] += len(notice)
                waiting.wake()
