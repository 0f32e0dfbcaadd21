"""Questions that come in through the relay, and who answers them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from holdfast.engines.deploy.relay.calls import HEAD, Head, Pipe, Status
from holdfast.engines.deploy.relay.parcels import Parcel
from holdfast.engines.deploy.relay.sealing import Card, SealError, Session
from holdfast.engines.deploy.storage.messages import parse

if TYPE_CHECKING:
    from holdfast.engines.deploy.relay.switchboard import Switchboard

Code = grpc.StatusCode

MOST_ANSWERING = 32  # calls of one process at a time
MOST_SESSIONS = 16  # processes of one member that are remembered


class Answerer(Protocol):
    """Who answers: the questions with short answers by name, and ``fetch`` with a long one."""

    @property
    def answers(self) -> Mapping[str, Callable[[Any, Any], Awaitable[bytes]]]: ...

    def fetch(self, frames: Any, context: Any) -> AsyncGenerator[bytes, None]: ...


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


class Questions:
    """All questions of others; ``service`` answers them, and ``board`` carries the answers."""

    def __init__(self, board: Switchboard, service: Answerer) -> None:
        self.board, self.service = board, service
        self.known: dict[str, dict[str, Answering]] = {}  # by asker, by process
        self.oldest: dict[str, int] = {}  # cards issued before belong to processes that were forgotten

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Answers under way."""
        return [task for known in self.known.values() for a in known.values() for task in a.tasks.values()]

    async def take(self, asker: str, instance: str, parcel: Parcel) -> None:
        """A frame of a question."""
        known = self.known.setdefault(asker, {})
        if parcel.cancels:  # not sealed: whoever can forge it can as well drop what is sent
            if instance in known and (task := known[instance].tasks.get(parcel.call)) is not None:
                task.cancel()
            return
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
            (length,) = HEAD.unpack_from(text)
            head: Head = parse(Head, text[HEAD.size : HEAD.size + length])
            pipe = answering.pipes[number] = Pipe()
            question = hashlib.sha256(text).digest()
            task = asyncio.ensure_future(self._answer((asker, instance), answering, number, head, question))
            answering.tasks[number] = task
            text = text[HEAD.size + length :]
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
        card = self.board.identity.check(parcel.card, asker)
        if card.instance != instance:
            raise SealError(f"card: not of the process that {asker} asks from")
        if card.issued < self.oldest.get(asker, 0):
            raise SealError(f"a question of a process of {asker} that is long gone")
        if len(known) >= MOST_SESSIONS:
            gone = known.pop(next(iter(known)))
            self.oldest[asker] = max(self.oldest.get(asker, 0), gone.card.issued + 1)
        known[instance] = Answering(self.board.identity.session(card, asks=False), card)

    async def _answer(
        self, where: tuple[str, str], answering: Answering, number: int, head: Head, question: bytes
    ) -> None:
        """Has ``service`` answer one question, and seals what it says."""
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
            await self.board.post(where, Parcel(number, frame, sealed, answers=True, last=last))
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
