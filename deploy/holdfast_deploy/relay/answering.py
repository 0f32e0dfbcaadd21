"""Questions that come in through the relay, and who answers them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from holdfast_deploy.relay.calls import HEAD, Head, Pipe, Status
from holdfast_deploy.relay.parcels import Parcel
from holdfast_deploy.relay.sealing import Card, SealError, Session
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.wire.listening import CODES
from holdfast_deploy.wire.protocol import Answerer, Peer, RefusedError, take_first

if TYPE_CHECKING:
    from holdfast_deploy.relay.switchboard import Switchboard

Code = grpc.StatusCode

MOST_ANSWERING = 32  # calls of one process at a time
MOST_SESSIONS = 16  # processes of one member that may go on asking
MOST_FORGOTTEN = 1000  # and of which no question is answered a second time


@dataclass
class Answering:
    """A process that asks us, and its questions under way."""

    session: Session
    card: Card
    last_call: int = 0
    pipes: dict[int, Pipe] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class Questions:
    """All questions of others; ``service`` answers them, and ``board`` carries the answers."""

    def __init__(self, board: Switchboard, service: Answerer) -> None:
        self.board, self.service = board, service
        # By asker, by process: those that are gone come first, and who asked last is last.
        self.known: dict[str, dict[str, Answering]] = {}
        self.forgotten: dict[str, dict[str, int]] = {}  # by asker, by process: of when its card was
        self.oldest: dict[str, int] = {}  # cards from before are of processes forgotten even there

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Answers under way."""
        return [task for known in self.known.values() for a in known.values() for task in a.tasks.values()]

    @property
    def under_way(self) -> set[tuple[str, str]]:
        """The askers, and their processes, that are being answered."""
        return {(asker, i) for asker, known in self.known.items() for i, a in known.items() if a.tasks}

    def renew(self) -> None:
        """There is a new key, with which nothing old can be repeated: everybody introduces itself again."""
        for task in self.tasks:
            task.cancel()
        for remembered in (self.known, self.forgotten, self.oldest):
            remembered.clear()

    async def take(self, asker: str, instance: str, parcel: Parcel) -> None:
        """A frame of a question."""
        known = self.known.get(asker, {})
        if parcel.cancels:  # not sealed: whoever can forge it can as well drop what is sent
            if instance in known and (task := known[instance].tasks.get(parcel.call)) is not None:
                task.cancel()
            return
        if parcel.frame == 0 and instance not in known:
            known = self._introduce(asker, instance, parcel)
        if instance not in known:
            raise SealError(f"a question of {asker} without its beginning")
        answering, number = known[instance], parcel.call
        text = answering.session.open_question(number, parcel.frame, parcel.last, parcel.sealed)
        if parcel.frame == 0:
            if number <= answering.last_call:
                raise SealError(f"a question of {asker} was repeated or reordered")
            answering.last_call = number
            known[instance] = known.pop(instance)
            question = hashlib.sha256(text).digest()
            if len(answering.tasks) >= MOST_ANSWERING:
                raise SealError(f"{asker} asks too much at a time")
            head, text = _head(text)
            if not parcel.last and head.kind != "Submit":  # nobody would read on, and all others would wait
                raise SealError(f"a question of {asker} in more than one frame")
            pipe = answering.pipes[number] = Pipe()
            task = asyncio.ensure_future(self._answer((asker, instance), answering, number, head, question))
            answering.tasks[number] = task
        else:
            pipe = answering.pipes.get(number) or Pipe()
            if parcel.frame != pipe.expected:
                raise SealError(f"frames of a question of {asker} were lost, repeated or reordered")
        pipe.expected += 1
        await pipe.put(text)
        if parcel.last:
            await pipe.put(None)

    def gone(self, asker: str, instance: str) -> None:
        """The relay has lost a process, which makes room before others do. It may come back, and go on."""
        known = self.known.get(asker, {})
        if instance in known:
            self.known[asker] = {instance: known.pop(instance), **known}

    def _introduce(self, asker: str, instance: str, parcel: Parcel) -> dict[str, Answering]:
        """A process that has not asked before; all that are known of its member."""
        card = self.board.identity.check(parcel.card, asker)
        if card.instance != instance:
            raise SealError(f"card: not of the process that {asker} asks from")
        forgotten = self.forgotten.setdefault(asker, {})
        if instance in forgotten or card.issued < self.oldest.get(asker, 0):
            raise SealError(f"a question of a process of {asker} that is long gone")
        session = self.board.identity.session(card, asks=False)
        known = self.known.setdefault(asker, {})
        if len(known) >= MOST_SESSIONS:
            name = next((name for name, other in known.items() if not other.tasks), next(iter(known)))
            gone = known.pop(name)
            for task in gone.tasks.values():
                task.cancel()
            forgotten[name] = gone.card.issued  # or its questions could be repeated
            if len(forgotten) > MOST_FORGOTTEN:
                first = min(forgotten, key=lambda name: forgotten[name])
                self.oldest[asker] = forgotten.pop(first) + 1
        known[instance] = Answering(session, card)
        return known

    async def _answer(
        self, where: tuple[str, str], answering: Answering, number: int, head: Head, question: bytes
    ) -> None:
        """Has ``service`` answer one question, and seals what it says."""
        peer = Peer(where[0], "relay", answering.card.certificate.encode(), head.said)
        pipe, frame, status = answering.pipes[number], 0, Status()

        async def frames() -> AsyncIterator[bytes]:
            while (piece := await pipe.next()) is not None:
                yield piece

        async def say(text: bytes, last: bool = False) -> None:
            nonlocal frame
            sealed = answering.session.seal_answer(number, frame, last, text, question)
            await self.board.post(where, Parcel(number, frame, sealed, answers=True, last=last))
            frame += 1

        try:
            try:
                if head.kind == "Fetch":
                    async with aclosing(self.service.fetch(peer, await take_first(frames()))) as pieces:
                        async for piece in pieces:
                            await say(piece)
                elif head.kind == "Submit":
                    await say(await self.service.submit(peer, frames()))
                elif (handler := self.service.answers.get(head.kind)) is not None:
                    await say(await handler(peer, await take_first(frames())))
                else:
                    status = Status(code=Code.UNIMPLEMENTED.name, details="no such question")
            except RefusedError as error:
                status = Status(code=CODES[error.kind].name, details=str(error)[:2000])
            await say(status.model_dump_json().encode(), last=True)
        except grpc.aio.AioRpcError:
            return  # the asker is gone, or asks again
        finally:
            pipe.close()
            answering.pipes.pop(number, None)
            answering.tasks.pop(number, None)


def _head(text: bytes) -> tuple[Head, bytes]:
    """What the first frame of a question begins with, and what it asks."""
    if len(text) < HEAD.size:
        raise SealError("a question without a head")
    start = HEAD.size + HEAD.unpack_from(text)[0]
    head: Head = parse(Head, text[HEAD.size : start])
    return head, text[start:]
