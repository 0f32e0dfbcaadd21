"""Asking other members: the questions, and the connection that they go over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import grpc

from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.protocol import MASKED
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.reading import Reading, Readings
from holdfast_deploy.storage.links import Dependencies, ForgedError, LinkDigests
from holdfast_deploy.storage.messages import (
    UNSEALED,
    Header,
    MessageFile,
    TensorSpec,
    parse,
)
from holdfast_deploy.wire.arrivals import Arrivals
from holdfast_deploy.wire.credentials import Credentials, serial_of
from holdfast_deploy.wire.dialling import (
    LONGEST_REASON,
    NO_ANSWER,
    Unreachable,
    Wait,
    look,
    open_channel,
    reason,
)
from holdfast_deploy.wire.patience import patiently
from holdfast_deploy.wire.protocol import (
    AUDIT_KEY,
    MODEL_KEY,
    NAME_KEY,
    READING_KEY,
    SERVICE,
    SILENCE,
    Answer,
    Ask,
    Counted,
    LeftOut,
    audit_message,
)
from holdfast_deploy.wire.status import read_status

T = TypeVar("T")


@dataclass
class Connection:
    """The way to one other member. All of it runs on the event loop."""

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
    channel: Any = None  # None: one is opened to the peer's address
    round: int = 0  # where the peer is, as far as we know
    bytes_received: int = 0
    bytes_sent: int = 0
    retries: int = 0

    def __post_init__(self) -> None:
        self._relayed = self.channel is not None
        if self.channel is None:
            self.channel = open_channel(self.federation, self.peer, self.credentials)
        self.arrivals = Arrivals(self.federation, self.peer, self.inbox, self.dependencies)
        self._introduced = False
        self._shown: bytes | None = None  # the peer's certificate
        self._dialled = -1  # version of our credentials when we last looked at it; -1: look again
        self._dialling = asyncio.Lock()  # else the second of two closes the channel that the first has opened

    @property
    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """What is said beside every question."""
        trail = self.events.trail
        said = {
            NAME_KEY: "" if self.credentials else self.name,
            MODEL_KEY: self.federation.model_identity,
            READING_KEY: self.readings.header,
            AUDIT_KEY: "" if trail is None else str(trail.durable),
        }
        return tuple((key, value) for key, value in said.items() if value) or None

    def _passed(self, event: str, header: Header) -> None:
        """A line in the audit log: a message that came from the peer, or was brought to it."""
        who = {"peer": self.peer, "address": self.federation.member(self.peer).address}
        if self._shown is not None:
            who["serial"] = serial_of(self._shown)
        audit_message(self.events, event, header, **who)

    async def _dial(self) -> None:
        """Looks at who answers at the peer's address, unless the connection is known to be good."""
        if self._relayed:  # its card says who it is
            return
        async with self._dialling:
            # A list that comes while we look has us look again.
            while self._dialled != (version := self.credentials.version if self.credentials else 0):
                shown = await look(self.federation, self.peer, self.credentials)
                if shown != self._shown or version:
                    await self.channel.close()
                    self.channel = open_channel(self.federation, self.peer, self.credentials, shown)
                self._shown, self._dialled = shown, version

    def drop_if_revoked(self) -> None:
        """Ends what is under way with a peer whose certificate holds no longer."""
        if self.credentials is not None and self._shown is not None:
            try:
                self.credentials.check(self.peer, self._shown)
            except HoldfastError as error:
                self.events.complain("refused", peer=self.peer, reason=str(error))
                self._closing = asyncio.ensure_future(self.channel.close())

    async def close(self) -> None:
        await self.channel.close()
        self.arrivals.close()

    # --- what can be asked ---------------------------------------------------------------------------------

    async def fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile:
        """The peer's message of an exchange, checked; waits for it, unless it came before."""

        async def attempt() -> MessageFile | None:
            kept = await self.arrivals.kept(round, exchange, tensors)
            return kept if kept is not None else await self._fetch(round, exchange, tensors)

        message = await self._patiently(attempt, sum(tensor.size for tensor in tensors))
        self._heard_of(round, round)
        return message

    async def agreed(self, round: int, exchange: int) -> bool:
        """Whether the peer, who decides, counts the sporadic link between us as active."""

        async def attempt() -> bool | None:
            return (await self._ask("Agree", round, exchange)).active

        return await self._patiently(attempt, size=0)

    async def release(self, round: int) -> None:
        """Tells the peer, if it is there, that we have saved all rounds before ``round``."""
        try:
            await self._dial()
            await self._ask("Release", round, 0)
        except (Unreachable, grpc.aio.AioRpcError, TimeoutError, HoldfastError):
            return  # it keeps messages a little longer

    async def submit(self, message: MessageFile) -> None:
        """Brings ``message`` to the server, and returns when it is safe there."""

        async def attempt() -> bool | None:
            if not self._introduced:  # so that the server knows first which run the message is of
                await self._ask("Release", message.header.round, 0)
                self._introduced = True
            frames = message.frames(self.federation.compression == "lossless")
            first = list(islice(frames, 1))  # gRPC would hide from us that the file cannot be opened
            self.events.require_room()
            self._passed("sent", message.header)
            await self.events.lasting()  # nothing leaves without a line that survives a power cut
            stream = self._stream(message.header, chain(first, frames))
            call = self._method("stream_unary", "Submit")(stream, metadata=self.metadata)
            try:
                answer = parse(Answer, await call)
            except grpc.aio.AioRpcError:  # is our own file as it was written?
                self._introduced = False  # and the server where it was? It may have been put back
                await asyncio.get_running_loop().run_in_executor(self.arrivals.pool, message.verify)
                raise
            self._raise_if_left_out(answer, message.header.round)
            return True if answer.received else None

        await self._patiently(attempt, message.header.size)

    async def say(self, method: str, question: bytes) -> bytes:
        """What the peer answers to a question that is of no round."""
        await self._dial()
        call = self._method("unary_unary", method)
        return bytes(await call(question, metadata=self.metadata, timeout=SILENCE))

    def _raise_if_left_out(self, answer: Answer, round: int) -> None:
        may_be = self.federation.round is not None or self.federation.secret_cohorts
        if answer.active is False and may_be:
            raise LeftOut(round, answer.round)

    async def status(self, timeout: float) -> dict[str, Any]:
        """What the peer says about itself; if it does not answer, only why as its ``phase``."""
        try:
            async with asyncio.timeout(timeout):
                await self._dial()
            call = self._method("unary_unary", "Status")(b"", metadata=self.metadata, timeout=timeout)
            return read_status(await call, self.peer, self.federation)
        except (Unreachable, TimeoutError) as error:
            return {"phase": "down" if str(error) in ("", NO_ANSWER) else str(error)[:LONGEST_REASON]}
        except grpc.aio.AioRpcError as error:
            return {"phase": "down" if error.code() == grpc.StatusCode.UNAVAILABLE else reason(error)}
        except HoldfastError as error:
            return {"phase": f"malformed answer ({error})"[:LONGEST_REASON]}

    # --- how -----------------------------------------------------------------------------------------------

    async def _patiently(self, attempt: Callable[[], Awaitable[T | None]], size: int) -> T:
        """Repeats ``attempt`` until it gives something, a message of ``size`` bytes for instance."""

        async def dialled() -> T | None:
            await self._dial()
            try:
                return await attempt()
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    self._dialled = -1
                raise

        return await patiently(self, dialled, self.federation.limits.patience(size))

    async def _fetch(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile | None:
        question = self._question(round, exchange, *self.arrivals.so_far(round, exchange))
        call = self._method("unary_stream", "Fetch")(question, metadata=self.metadata)
        try:
            first = await asyncio.wait_for(call.read(), SILENCE)
            if first is grpc.aio.EOF:
                raise HoldfastError("an answer without a header")
            answer = parse(Answer, first)
            await self._compare(answer, round)
            self._heard_of(answer.round, round)
            self._raise_if_left_out(answer, round)
            if answer.header is None:
                if answer.active and self.federation.secure_aggregation is not None:
                    if exchange <= MASKED:
                        raise HoldfastError("says that the round is over, and has no message of this client")
                    raise Counted
                return None
            received = await self.arrivals.take(
                round, exchange, tensors, answer.header, answer.offset, self._pieces(call)
            )
            self._passed("received", received.header)
            return received
        finally:
            call.cancel()

    async def _pieces(self, call: Any) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(SILENCE):
                frame = await call.read()
            if frame is grpc.aio.EOF:
                return
            self.bytes_received += len(frame)
            yield frame

    async def _stream(self, header: Header, frames: Iterable[bytes]) -> AsyncIterator[bytes]:
        yield header.model_dump_json().encode()
        for frame in frames:
            self.bytes_sent += len(frame)
            yield frame

    async def _ask(self, method: str, round: int, exchange: int) -> Answer:
        call = self._method("unary_unary", method)
        reply = await call(self._question(round, exchange), metadata=self.metadata, timeout=SILENCE)
        answer: Answer = parse(Answer, reply)
        await self._compare(answer, round)
        self._heard_of(answer.round, round)
        return answer

    async def _compare(self, answer: Answer, round: int) -> None:
        """Whether the peer saw the same pass over our link as we did; if not, it is told before we stop."""
        try:
            self.link_digests.compare(self.peer, answer.passed)
        except ForgedError:
            call = self._method("unary_unary", "Release")
            with suppress(grpc.aio.AioRpcError, TimeoutError):  # a refusal: now it knows
                await call(self._question(round, 0), metadata=self.metadata, timeout=SILENCE)
            raise

    def _heard_of(self, claimed: int, wanted: int) -> None:
        """The peer says where it is. Beyond the round that is wanted from it, that is no progress."""
        self.round = max(self.round, min(claimed, wanted))

    def _question(self, round: int, exchange: int, offset: int = 0, content: str = UNSEALED) -> bytes:
        ask = Ask(
            federation=self.federation.id,
            start=self.start,
            round=round,
            exchange=exchange,
            depends_on=self.dependencies.known,
            passed=self.link_digests.report(self.peer),
            offset=offset,
            content=content,
        )
        return ask.model_dump_json().encode()

    def _method(self, kind: str, name: str) -> Any:
        return getattr(self.channel, kind)(f"/{SERVICE}/{name}")
