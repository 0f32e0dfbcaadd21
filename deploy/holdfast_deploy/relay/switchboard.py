"""A member's end of the relay: questions go out and come in, as if gRPC had carried them.

``channel`` gives what a ``Connection`` needs of a gRPC channel, and ``Service`` gets its questions with a
context like gRPC's. So all that members check about one another is checked here, too, and once.

Where members may change, every roster is a federation of its own, with a switchboard and keys of its own.
One more lasts through all rosters: over it members agree who takes part (``members_scope``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay.answering import Questions
from holdfast_deploy.relay.calls import HEAD, Call, RelayedChannel, Sender, failure
from holdfast_deploy.relay.parcels import (
    RELAY_SERVICE,
    CardAsk,
    Hello,
    Parcel,
    unstamp,
)
from holdfast_deploy.relay.sealing import LIFETIME, Card, Identity, SealError, Session, new_identity
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dialling import open_channel
from holdfast_deploy.wire.protocol import SILENCE, Answerer

Code = grpc.StatusCode

MOST_IDLE = 16  # streams to processes with which nothing is under way
PAUSES = (0.1, 5.0)  # seconds between attempts to reach the relay: the first, the longest


def members_scope(file: Federation) -> str:
    """What the switchboards are bound to over which members of ``file`` agree who takes part."""
    return f"{file.id}-members"


class Switchboard:
    """One member's connection to the relay. All of it runs on the event loop.

    Only switchboards of the same ``scope`` talk to one another: by default of one federation, in one roster.
    """

    def __init__(
        self, federation: Federation, name: str, credentials: Credentials, events: Events, scope: str = ""
    ) -> None:
        assert federation.relay is not None
        self.name, self.credentials, self.events = name, credentials, events
        self.scope = scope or federation.id
        self.identity: Identity = new_identity(self.scope, name, credentials)
        self.questions: Questions | None = None  # None: nobody is answered
        self.channel = open_channel(federation, federation.relay.name, credentials)
        self.cards: dict[str, Card] = {}
        # By the peer's process: with the number of the next call.
        self.asking: dict[tuple[str, str], tuple[Session, int]] = {}
        self.calls: dict[tuple[str, str, int], Call] = {}
        self.senders: dict[tuple[str, str], Sender] = {}
        self._hanging_up: set[asyncio.Future[None]] = set()
        self._connected = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    def open(self, service: Answerer | None = None) -> None:
        """Connects, again and again; ``service`` answers others' questions."""
        self.questions = None if service is None else Questions(self, service)
        self._listening = asyncio.ensure_future(self._listen())

    def channel_to(self, peer: str) -> RelayedChannel:
        """As gRPC's channels are used."""
        return RelayedChannel(self, peer)

    async def close(self) -> None:
        tasks = [] if self.questions is None else self.questions.tasks
        if tasks:  # last words
            await asyncio.wait(tasks, timeout=1.0)
        for sender in self.senders.values():
            await sender.finish()
        for task in [*tasks, *([self._listening] if self._listening else [])]:
            task.cancel()
        await self.channel.close()

    # --- what comes in ------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        pause = PAUSES[0]
        while True:
            try:
                async with asyncio.timeout(LIFETIME / 2):  # then there is a new key
                    await self._receive()
            except TimeoutError:
                self.identity = new_identity(self.scope, self.name, self.credentials)
                self.asking.clear()
                if self.questions is not None:
                    self.questions.renew()
            except grpc.aio.AioRpcError as error:
                self.events.complain("the relay cannot be reached", reason=str(error.details())[:200])
            pause = PAUSES[0] if self._connected.is_set() else min(2 * pause, PAUSES[1])
            self._connected.clear()
            for call in list(self.calls.values()):
                self._fail(call, "the connection to the relay broke")
            await asyncio.sleep(pause)

    async def _receive(self) -> None:
        card = self.identity.card
        shown = "" if self.questions is None else card.model_dump_json()
        hello = Hello(instance=card.instance, scope=self.scope, card=shown)
        call = self.channel.unary_stream(f"/{RELAY_SERVICE}/Receive")(hello.model_dump_json().encode())
        try:
            while (content := await call.read()) is not grpc.aio.EOF:
                self._connected.set()
                if content:
                    await self._take(content)
        finally:
            call.cancel()

    async def _take(self, content: bytes) -> None:
        try:
            sender, instance, packed = unstamp(content)
            parcel = Parcel.unpack(packed)
            if parcel.gone:
                self._lost((sender, instance), "it was started again, or has left the relay")
                if self.questions is not None:
                    self.questions.gone(sender, instance)
            elif parcel.answers:
                call = self.calls.get((sender, instance, parcel.call))
                if call is not None:
                    try:
                        await call.take(parcel)
                    except HoldfastError as error:
                        self._fail(call, str(error))
                        raise
            elif self.questions is None:
                raise SealError(f"{sender} asks, but nobody answers here")
            else:
                await self.questions.take(sender, instance, parcel)
        except HoldfastError as error:
            self.events.complain("a parcel was refused", reason=str(error))

    # --- asking -------------------------------------------------------------------------------------------

    async def ask(self, call: Call, frames: AsyncIterator[bytes]) -> None:
        """Sends the question of ``call``."""
        async with asyncio.timeout(SILENCE):
            await self._connected.wait()
        card = await self._card_of(call.peer)
        where = (call.peer, card.instance)
        if where not in self.asking:
            self.asking[where] = (self.identity.session(card, asks=True), 1)
        session, number = self.asking[where]
        self.asking[where] = (session, number + 1)
        call.session, call.key = session, (*where, number)
        frame, held = 0, None
        async for piece in frames:  # the last one is marked as such, so each is sent when the next is there
            if held is not None:
                await self._send_question(call, session, number, frame, held, last=False)
                frame += 1
            held = piece
        await self._send_question(call, session, number, frame, held or b"", last=True)

    async def _send_question(
        self, call: Call, session: Session, number: int, frame: int, piece: bytes, *, last: bool
    ) -> None:
        assert call.key is not None
        card = b""
        if frame == 0:
            head = call.head.model_dump_json().encode()
            piece = HEAD.pack(len(head)) + head + piece
            call.question, card = (
                hashlib.sha256(piece).digest(),
                self.identity.card.model_dump_json().encode(),
            )
            self.calls[call.key] = call
        sealed = session.seal_question(number, frame, last, piece)
        await self.post(call.key[:2], Parcel(number, frame, sealed, last=last, card=card))

    async def _card_of(self, peer: str) -> Card:
        if peer not in self.cards:
            ask = self.channel.unary_unary(f"/{RELAY_SERVICE}/Card")
            text = await ask(CardAsk(of=peer, scope=self.scope).model_dump_json().encode(), timeout=SILENCE)
            if not text:
                raise failure(Code.UNAVAILABLE, "it is not connected to the relay")
            self.cards[peer] = self.identity.check(text, peer)
        card = self.cards[peer]
        self.credentials.check(peer, card.certificate.encode())  # it may have been revoked since
        return card

    def _fail(self, call: Call, reason: str) -> None:
        self.cards.pop(call.peer, None)  # it may have another by now
        self.forget(call, cancel=False)
        pipe, error = call.pipe, failure(Code.UNAVAILABLE, reason)
        while pipe.queue.full():
            pipe.queue.get_nowait()
        pipe.queue.put_nowait(error)

    def _lost(self, where: tuple[str, str], reason: str) -> None:
        """Questions to that process may not have arrived, or are not going to be answered."""
        for call in [call for key, call in self.calls.items() if key[:2] == where]:
            self._fail(call, reason)

    def forget(self, call: Call, *, cancel: bool = True) -> None:
        """``call`` is over; if its answer is not, the peer need not go on."""
        if call.key is not None and self.calls.pop(call.key, None) is not None and cancel:
            where, number = call.key[:2], call.key[2]
            if call.pipe.expected == 0:  # no answer at all: it may have another card by now
                self.cards.pop(call.peer, None)
            sender = self.senders.get(where)
            if sender is not None:
                sender.hint(Parcel(number, 0, b"", cancels=True))

    # --- what goes out ------------------------------------------------------------------------------------

    async def post(self, where: tuple[str, str], parcel: Parcel) -> None:
        """To the process ``where``; an ``AioRpcError`` if the relay does not take it."""
        sender = self.senders.get(where)
        if sender is None or sender.call.done():
            self._hang_up()
            sender = self.senders[where] = Sender(self.channel, where, self.identity.card.instance)
            sender.call.add_done_callback(partial(self._ended, where, sender))
        await sender.send(parcel)

    def _ended(self, where: tuple[str, str], sender: Sender, _: Any) -> None:
        if not sender.hung_up:
            self._lost(where, "the relay did not take all that was sent")

    def _hang_up(self) -> None:
        """Ends streams that nobody uses: processes come and go, and the relay carries so many at a time."""
        asked = set() if self.questions is None else self.questions.under_way
        used = asked | {key[:2] for key in self.calls}
        idle = [where for where, sender in self.senders.items() if where not in used and not sender.writing]
        for where in idle[:-MOST_IDLE]:
            sender = self.senders.pop(where)
            sender.hung_up = True
            task = asyncio.ensure_future(sender.finish())
            self._hanging_up.add(task)
            task.add_done_callback(self._hanging_up.discard)
