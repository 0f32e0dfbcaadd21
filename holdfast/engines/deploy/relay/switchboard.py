"""A member's end of the relay: questions go out and come in, as if gRPC had carried them.

``channel`` gives what a ``Connection`` needs of a gRPC channel, and ``Service`` gets its questions with a
context like gRPC's. So all that members check about one another is checked here, too, and once.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.ops.events import Events
from holdfast.engines.deploy.relay.calls import Call, Head, Pipe, RelayedChannel, Sender, Status, failure
from holdfast.engines.deploy.relay.parcels import (
    RELAY_SERVICE,
    CardAsk,
    Hello,
    Parcel,
    unstamp,
)
from holdfast.engines.deploy.relay.sealing import LIFETIME, Card, Identity, SealError, Session, new_identity
from holdfast.engines.deploy.storage.messages import parse
from holdfast.engines.deploy.wire.credentials import Credentials
from holdfast.engines.deploy.wire.dialling import open_channel
from holdfast.engines.deploy.wire.protocol import SILENCE
from holdfast.engines.deploy.wire.service import Service

Code = grpc.StatusCode

MOST_ANSWERING = 32  # calls of one process at a time
MOST_SESSIONS = 16  # processes of one member that are remembered
PAUSES = (0.1, 5.0)  # seconds between attempts to reach the relay: the first, the longest

_HEAD = struct.Struct(">H")


class Aborted(Exception):  # noqa: N818 - as in gRPC
    """A question was answered with an error."""


@dataclass
class Context:
    """What ``Service`` asks of gRPC's context: who calls, and how to refuse."""

    name: str
    certificate: str  # PEM
    said: dict[str, str]
    status: Status = field(default_factory=Status)

    def auth_context(self) -> dict[str, list[bytes]]:
        names, pem = [self.name.encode()], [self.certificate.encode()]
        return {"x509_subject_alternative_name": names, "x509_pem_cert": pem}

    def peer(self) -> str:
        return "relay"

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        return tuple(self.said.items())

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.status = Status(code=code.name, details=details[:2000])
        raise Aborted


@dataclass
class Answering:
    """A process that asks us, and its questions under way."""

    session: Session
    card: Card
    last_call: int = 0
    pipes: dict[int, Pipe] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class Switchboard:
    """One member's connection to the relay. All of it runs on the event loop."""

    def __init__(self, federation: Federation, name: str, credentials: Credentials, events: Events) -> None:
        assert federation.relay is not None
        self.federation, self.name, self.credentials, self.events = federation, name, credentials, events
        self.identity: Identity = new_identity(federation.id, name, credentials)
        self.service: Service | None = None  # None: nobody is answered
        self.channel = open_channel(federation, federation.relay.name, credentials)
        self.cards: dict[str, Card] = {}
        self.asking: dict[
            tuple[str, str], tuple[Session, int]
        ] = {}  # by peer's process: the next call's number
        self.calls: dict[tuple[str, str, int], Call] = {}
        self.answering: dict[str, dict[str, Answering]] = {}  # by asker, by process
        self.oldest: dict[str, int] = {}  # cards issued before belong to processes that were forgotten
        self.senders: dict[tuple[str, str], Sender] = {}
        self._connected = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None

    def open(self, service: Service | None = None) -> None:
        """Connects, again and again; ``service`` answers others' questions."""
        self.service = service
        self._listening = asyncio.ensure_future(self._listen())

    def channel_to(self, peer: str) -> RelayedChannel:
        """As gRPC's channels are used."""
        return RelayedChannel(self, peer)

    async def close(self) -> None:
        tasks = [
            task for known in self.answering.values() for a in known.values() for task in a.tasks.values()
        ]
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
                self.identity = new_identity(self.federation.id, self.name, self.credentials)
                self.asking.clear()
                self.answering.clear()
            except grpc.aio.AioRpcError as error:
                self.events.complain("the relay cannot be reached", reason=str(error.details())[:200])
            pause = PAUSES[0] if self._connected.is_set() else min(2 * pause, PAUSES[1])
            self._connected.clear()
            for call in list(self.calls.values()):
                self._fail(call, "the connection to the relay broke")
            await asyncio.sleep(pause)

    async def _receive(self) -> None:
        card = self.identity.card
        hello = Hello(instance=card.instance, card=card.model_dump_json() if self.service else "")
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
            elif parcel.answers:
                call = self.calls.get((sender, instance, parcel.call))
                if call is not None:
                    try:
                        await call.take(parcel)
                    except HoldfastError as error:
                        self._fail(call, str(error))
                        raise
            else:
                await self._question(sender, instance, parcel)
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
            piece = _HEAD.pack(len(head)) + head + piece
            call.question, card = (
                hashlib.sha256(piece).digest(),
                self.identity.card.model_dump_json().encode(),
            )
            self.calls[call.key] = call
        sealed = session.seal_question(number, frame, last, piece)
        await self._post(call.key[:2], Parcel(number, frame, sealed, last=last, card=card))

    async def _card_of(self, peer: str) -> Card:
        if peer not in self.cards:
            ask = self.channel.unary_unary(f"/{RELAY_SERVICE}/Card")
            text = await ask(CardAsk(of=peer).model_dump_json().encode(), timeout=SILENCE)
            if not text:
                raise failure(Code.UNAVAILABLE, "it is not connected to the relay")
            self.cards[peer] = self.identity.check(text, peer)
        return self.cards[peer]

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

    # --- answering ----------------------------------------------------------------------------------------

    async def _question(self, asker: str, instance: str, parcel: Parcel) -> None:
        known = self.answering.setdefault(asker, {})
        if parcel.cancels:  # not sealed: whoever can forge it can as well drop what is sent
            if instance in known and (task := known[instance].tasks.get(parcel.call)) is not None:
                task.cancel()
            return
        if self.service is None:
            raise SealError(f"{asker} asks, but nobody answers here")
        if parcel.frame == 0 and instance not in known:
            self._introduce(asker, instance, parcel, known)
        if instance not in known:
            raise SealError(f"a question of {asker} without its beginning")
        answering, number = known[instance], parcel.call
        text = answering.session.open_question(number, parcel.frame, parcel.last, parcel.sealed)
        if parcel.frame == 0:
            if number <= answering.last_call:
                raise SealError(f"a question of {asker} was repeated or reordered")
            answering.last_call = number
            if len(answering.tasks) >= MOST_ANSWERING:
                raise SealError(f"{asker} asks too much at a time")
            (length,) = _HEAD.unpack_from(text)
            head: Head = parse(Head, text[_HEAD.size : _HEAD.size + length])
            pipe = answering.pipes[number] = Pipe()
            question = hashlib.sha256(text).digest()
            task = asyncio.ensure_future(self._answer((asker, instance), answering, number, head, question))
            answering.tasks[number] = task
            text = text[_HEAD.size + length :]
        else:
            pipe = answering.pipes.get(number) or Pipe()
            if parcel.frame != pipe.expected:
                raise SealError(f"frames of a question of {asker} were lost, repeated or reordered")
        pipe.expected += 1
        await pipe.put(text)
        if parcel.last:
            await pipe.put(None)

    def _introduce(self, asker: str, instance: str, parcel: Parcel, known: dict[str, Answering]) -> None:
        """A process that has not asked before."""
        card = self.identity.check(parcel.card, asker)
        if card.instance != instance:
            raise SealError(f"card: not of the process that {asker} asks from")
        if card.issued < self.oldest.get(asker, 0):
            raise SealError(f"a question of a process of {asker} that is long gone")
        if len(known) >= MOST_SESSIONS:
            gone = known.pop(next(iter(known)))
            self.oldest[asker] = max(self.oldest.get(asker, 0), gone.card.issued + 1)
        known[instance] = Answering(self.identity.session(card, asks=False), card)

    async def _answer(
        self, where: tuple[str, str], answering: Answering, number: int, head: Head, question: bytes
    ) -> None:
        """Has ``service`` answer one question, and seals what it says."""
        assert self.service is not None
        context, pipe, frame = (
            Context(where[0], answering.card.certificate, head.said),
            answering.pipes[number],
            0,
        )

        async def frames() -> AsyncIterator[bytes]:
            while (piece := await pipe.next()) is not None:
                yield piece

        async def say(text: bytes, last: bool = False) -> None:
            nonlocal frame
            sealed = answering.session.seal_answer(number, frame, last, text, question)
            await self._post(where, Parcel(number, frame, sealed, answers=True, last=last))
            frame += 1

        try:
            try:
                if head.kind == "Fetch":
                    async with aclosing(self.service.fetch(frames(), context)) as pieces:
                        async for piece in pieces:
                            await say(piece)
                elif (handler := self.service.answers.get(head.kind)) is not None:
                    await say(await handler(frames(), context))
                else:
                    context.status = Status(code=Code.UNIMPLEMENTED.name, details="no such question")
            except Aborted:
                pass  # ``context`` knows why
            await say(context.status.model_dump_json().encode(), last=True)
        except grpc.aio.AioRpcError:
            return  # the asker is gone, or asks again
        finally:
            pipe.close()
            answering.pipes.pop(number, None)
            answering.tasks.pop(number, None)

    # --- what goes out ------------------------------------------------------------------------------------

    async def _post(self, where: tuple[str, str], parcel: Parcel) -> None:
        sender = self.senders.get(where)
        if sender is None or sender.call.done():
            sender = self.senders[where] = Sender(self.channel, where, self.identity.card.instance)
            sender.call.add_done_callback(
                lambda _: self._lost(where, "the relay did not take all that was sent")
            )
        await sender.send(parcel)
