"""Asking other members: the questions, and how they are repeated until they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.protocol import MASKED
from holdfast_deploy.federation import SLOWEST, Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.links import Dependencies, ForgedError, LinkDigests
from holdfast_deploy.storage.messages import LENGTH, Header, MessageFile, TensorSpec, parse
from holdfast_deploy.wire.credentials import Credentials, serial_of
from holdfast_deploy.wire.dial import LONGEST_REASON, NO_ANSWER, Unreachable, way_to
from holdfast_deploy.wire.line import Body, Line
from holdfast_deploy.wire.protocol import (
    AUDIT_KEY,
    LINKS,
    MESSAGES,
    MODEL_KEY,
    NAME_KEY,
    READING_KEY,
    RELEASED,
    SILENCE,
    STATUS,
    SYNC,
    Answer,
    Ask,
    Counted,
    LeftOut,
    RefusedError,
    audit_message,
    pieces_of,
    whole_body,
)
from holdfast_deploy.wire.receiving import Arrivals
from holdfast_deploy.wire.retry import Wait, retry
from holdfast_deploy.wire.status import LONGEST_ANSWER, read_status

T = TypeVar("T")


@dataclass
class Connection:
    """What one other member is asked, and how often. All of it runs on the event loop."""

    federation: Federation
    name: str
    peer: str
    start: str
    inbox: Path
    credentials: Credentials | None
    events: Events
    waits: dict[str, Wait]
    dependencies: Dependencies
    # A process that only looks on has seen nothing pass.
    link_digests: LinkDigests = field(default_factory=lambda: LinkDigests(""))
    readings: Readings = field(default_factory=lambda: Readings("", Reading()))  # and knows nothing
    round: int = 0  # where the peer is, as far as we know
    bytes_received: int = 0
    bytes_sent: int = 0
    retries: int = 0

    def __post_init__(self) -> None:
        self.line = Line(way_to(self.federation, self.name, self.peer), self.credentials)
        self.arrivals = Arrivals(self.federation, self.peer, self.inbox, self.dependencies)
        self._introduced = False

    @property
    def said(self) -> dict[str, str]:
        """What is said beside every question."""
        trail = self.events.trail
        said = {
            NAME_KEY: "" if self.credentials else self.name,
            MODEL_KEY: self.federation.model_identity,
            READING_KEY: self.readings.header,
            AUDIT_KEY: "" if trail is None else str(trail.durable),
        }
        return {key: value for key, value in said.items() if value}

    def _passed(self, event: str, header: Header) -> None:
        """A line in the audit log: a message that came from the peer, or was brought to it."""
        who = {"peer": self.peer, "address": self.federation.member(self.peer).address}
        if self.line.shown:
            who["serial"] = serial_of(self.line.shown)
        audit_message(self.events, event, header, **who)

    def drop_if_revoked(self) -> None:
        """Ends what is under way with a peer whose certificate holds no longer."""
        if why := self.line.drop_if_revoked():
            self.events.complain("refused", peer=self.peer, reason=why)

    async def close(self) -> None:
        await self.line.close()
        self.arrivals.close()

    # --- what can be asked ---------------------------------------------------------------------------------

    async def fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile:
        """The peer's message of an exchange, checked; waits for it, unless it came before."""

        async def attempt() -> MessageFile | None:
            kept = await self.arrivals.kept(round, exchange, tensors)
            return kept if kept is not None else await self._fetch(round, exchange, tensors)

        message = await self._retry(attempt, sum(tensor.size for tensor in tensors))
        self._heard_of(round, round)
        return message

    async def agreed(self, round: int, exchange: int) -> bool:
        """Whether the peer, who decides, counts the sporadic link between us as active."""

        async def attempt() -> bool | None:
            return (await self._ask(LINKS, round, exchange)).active

        return await self._retry(attempt, size=0)

    async def release(self, round: int) -> None:
        """Tells the peer, if it is there, that we have saved all rounds before ``round``."""
        try:
            await self._ask(RELEASED, round, 0)
        except (Unreachable, TimeoutError, HoldfastError):
            return  # it keeps messages a little longer

    async def submit(self, message: MessageFile) -> None:
        """Brings ``message`` to the server, and returns when it is safe there."""

        async def attempt() -> bool | None:
            if not self._introduced:  # so that the server knows first which run the message is of
                await self._ask(RELEASED, message.header.round, 0)
                self._introduced = True
            for _ in message.chunks():  # aiohttp would hide from us that the file cannot be opened
                break
            self.events.require_room()
            self._passed("sent", message.header)
            await self.events.lasting()  # nothing leaves without a line that survives a power cut
            try:
                answer = await self._submit(message)
            except (Unreachable, RefusedError, TimeoutError):  # is our own file as it was written?
                self._introduced = False  # and the server where it was? It may have been put back
                await asyncio.get_running_loop().run_in_executor(self.arrivals.pool, message.verify)
                raise
            self._raise_if_left_out(answer, message.header.round)
            return True if answer.received else None

        await self._retry(attempt, message.header.size)

    async def say(self, question: str, body: bytes) -> bytes:
        """What the peer answers to a ``question`` that is of no round."""
        return await self.line.ask(question, body, self.said)

    def _raise_if_left_out(self, answer: Answer, round: int) -> None:
        may_be = self.federation.round is not None or self.federation.secret_cohorts
        if answer.active is False and may_be:
            raise LeftOut(round, answer.round)

    async def status(self, timeout: float) -> dict[str, Any]:
        """What the peer says about itself; if it does not answer, only why as its ``phase``."""
        try:
            text = await self.line.ask(STATUS, None, self.said, timeout=timeout, most=LONGEST_ANSWER)
            return read_status(text, self.peer, self.federation)
        except (Unreachable, TimeoutError) as error:
            return {"phase": "down" if str(error) in ("", NO_ANSWER) else str(error)[:LONGEST_REASON]}
        except RefusedError as error:
            return {"phase": str(error)}
        except HoldfastError as error:
            return {"phase": f"malformed answer ({error})"[:LONGEST_REASON]}

    # --- how -----------------------------------------------------------------------------------------------

    async def _retry(self, attempt: Callable[[], Awaitable[T | None]], size: int) -> T:
        """Repeats ``attempt`` until it gives something, a message of ``size`` bytes for instance."""
        return await retry(self, attempt, self.federation.limits.patience(size))

    async def _fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile | None:
        answer = await self._ask(SYNC, round, exchange)
        self._raise_if_left_out(answer, round)
        if answer.header is None:
            if answer.active and self.federation.secure_aggregation is not None:
                if exchange <= MASKED:
                    raise HoldfastError("says that the round is over, and has no message of this client")
                raise Counted
            return None
        pieces = partial(self._pieces, answer.header)
        received = await self.arrivals.take(round, exchange, tensors, answer.header, pieces)
        self._passed("received", received.header)
        return received

    async def _pieces(self, header: Header, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes of the message that ``header`` announced, from ``offset`` on."""
        path = f"{MESSAGES}/{header.round}/{header.exchange}"
        headers = self.said | {"If-Match": f'"{header.content}"'}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(SILENCE):
                asked = self.line.request("GET", path, headers=headers)
                answer = await stack.enter_async_context(asked)
            begins = f"bytes {offset}-" if offset else ""
            ranged = answer.headers.get("Content-Range", "")
            if (answer.status == 206) != bool(offset) or not ranged.startswith(begins):
                raise HoldfastError(f"Content-Range: expected {begins or 'all bytes'}")
            async for piece in pieces_of(answer.content):
                self.bytes_received += len(piece)
                yield piece

    async def _submit(self, message: MessageFile) -> Answer:
        header, lossless = message.header, self.federation.compression == "lossless"
        head = header.model_dump_json().encode()
        begin = LENGTH.pack(len(head)) + head

        def pieces() -> Iterator[bytes]:
            yield begin
            for frame in message.frames(lossless):
                self.bytes_sent += len(frame)
                yield frame

        body = Body(pieces, None if lossless else len(begin) + header.size)
        path = f"{MESSAGES}/{header.round}/{header.exchange}"
        silence = SILENCE + header.size / SLOWEST  # the server has to write all of it to its disk
        async with self.line.request("PUT", path, body, self.said, silence) as answer:
            reply: Answer = parse(Answer, await whole_body(answer.content))
        return reply

    async def _ask(self, question: str, round: int, exchange: int) -> Answer:
        reply = await self.line.ask(question, self._question(round, exchange), self.said)
        answer: Answer = parse(Answer, reply)
        await self._compare(answer, round)
        self._heard_of(answer.round, round)
        return answer

    async def _compare(self, answer: Answer, round: int) -> None:
        """Whether the peer saw the same pass over our link as we did; if not, it is told before we stop."""
        try:
            self.link_digests.compare(self.peer, answer.passed)
        except ForgedError:
            with suppress(Unreachable, HoldfastError, TimeoutError):  # a refusal: now it knows
                await self.line.ask(RELEASED, self._question(round, 0), self.said)
            raise

    def _heard_of(self, claimed: int, wanted: int) -> None:
        """The peer says where it is. Beyond the round that is wanted from it, that is no progress."""
        self.round = max(self.round, min(claimed, wanted))

    def _question(self, round: int, exchange: int) -> bytes:
        ask = Ask(
            federation=self.federation.id,
            start=self.start,
            round=round,
            exchange=exchange,
            depends_on=self.dependencies.known,
            passed=self.link_digests.report(self.peer),
        )
        return ask.model_dump_json().encode()
