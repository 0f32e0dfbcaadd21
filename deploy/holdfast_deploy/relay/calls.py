"""Questions through the relay, as a ``Connection`` asks them of a gRPC channel."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.relay.parcels import RELAY_SERVICE, Address, Parcel
from holdfast_deploy.relay.sealing import SealError, Session
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.wire.protocol import SILENCE

if TYPE_CHECKING:
    from holdfast_deploy.relay.switchboard import Switchboard

Code = grpc.StatusCode

BUFFERED = 8  # frames of one call that may wait in memory
HEAD = struct.Struct(">H")  # length of the head in the first frame of a question


class Head(BaseModel):
    """What the first frame of a question begins with."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    kind: str = Field(max_length=20)
    said: dict[str, str] = Field(default={}, max_length=8)  # beside the question, as gRPC's metadata


class Status(BaseModel):
    """The last frame of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    code: str = Field(default="OK", max_length=40)
    details: str = Field(default="", max_length=2000)


def failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    """As gRPC would report it."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


class Pipe:
    """Frames of a call, from whoever receives them to whoever uses them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(BUFFERED)
        self.expected, self.closed = 0, False

    async def put(self, item: bytes | Exception | None) -> None:
        """Waits for room; None is the end."""
        if not self.closed:
            await self.queue.put(item)

    def close(self) -> None:
        """Nobody reads any more."""
        self.closed = True
        while not self.queue.empty():
            self.queue.get_nowait()

    async def next(self) -> bytes | None:
        item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class Call:
    """A question under way, with the answer in pieces: what ``Connection`` uses of gRPC's calls."""

    def __init__(self, board: Switchboard, peer: str, head: Head, frames: AsyncIterator[bytes]) -> None:
        self.board, self.peer, self.head = board, peer, head
        self.pipe, self.question = Pipe(), b""
        self.key: tuple[str, str, int] | None = None
        self.session: Session | None = None
        self._asking = asyncio.ensure_future(self._ask(frames))

    async def _ask(self, frames: AsyncIterator[bytes]) -> None:
        try:
            await self.board.ask(self, frames)
        except grpc.aio.AioRpcError as error:
            await self.pipe.put(error)
        except HoldfastError as error:
            await self.pipe.put(failure(Code.UNAVAILABLE, str(error)))

    async def take(self, parcel: Parcel) -> None:
        """The next frame of the answer."""
        assert self.session is not None
        if parcel.frame != self.pipe.expected:
            raise SealError("frames of an answer were lost, repeated or reordered")
        text = self.session.open_answer(parcel.call, parcel.frame, parcel.last, parcel.sealed, self.question)
        self.pipe.expected += 1
        if not parcel.last:
            await self.pipe.put(text)
            return
        status: Status = parse(Status, text)
        code = getattr(Code, status.code, Code.UNKNOWN)
        await self.pipe.put(None if code is Code.OK else failure(code, status.details))

    async def read(self) -> Any:
        """The next piece, or ``grpc.aio.EOF``."""
        piece = await self.pipe.next()
        return grpc.aio.EOF if piece is None else piece

    def cancel(self) -> None:
        """The rest is not wanted."""
        self._asking.cancel()
        self.pipe.close()
        self.board.forget(self)


class RelayedChannel:
    """To ``peer`` through the relay, with the few calls of ``grpc.aio.Channel`` that are used."""

    def __init__(self, board: Switchboard, peer: str) -> None:
        self.board, self.peer = board, peer

    def unary_stream(self, path: str) -> Callable[..., Call]:
        def call(request: bytes, metadata: Any = None) -> Call:
            return self._call(path, _once(request), metadata)

        return call

    def unary_unary(self, path: str) -> Callable[..., Any]:
        async def call(request: bytes, metadata: Any = None, timeout: float = SILENCE) -> bytes:
            return await self._reply(self._call(path, _once(request), metadata), timeout)

        return call

    def stream_unary(self, path: str) -> Callable[..., Any]:
        async def call(frames: AsyncIterator[bytes], metadata: Any = None) -> bytes:
            return await self._reply(self._call(path, frames, metadata), None)

        return call

    async def close(self) -> None:
        """The switchboard is closed by its owner."""

    def _call(self, path: str, frames: AsyncIterator[bytes], metadata: Any) -> Call:
        head = Head(kind=path.rpartition("/")[2], said=dict(metadata or ()))
        return Call(self.board, self.peer, head, frames)

    @staticmethod
    async def _reply(call: Call, timeout: float | None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                reply = await call.read()
                if reply is grpc.aio.EOF:
                    raise failure(Code.UNKNOWN, "an answer without content")
                await call.read()
            return bytes(reply)
        finally:
            call.cancel()


async def _once(request: bytes) -> AsyncIterator[bytes]:
    yield request


class Sender:
    """The stream of parcels to one process of a peer."""

    def __init__(self, channel: Any, where: tuple[str, str], instance: str) -> None:
        self.call = channel.stream_unary(f"/{RELAY_SERVICE}/Send")()
        self.address = Address(to=where[0], instance=where[1], sender=instance)
        self.lock, self.begun = asyncio.Lock(), False
        self.hung_up = False  # nothing was under way: no call depends on how it ends
        self.writing: set[asyncio.Future[None]] = set()

    async def send(self, parcel: Parcel) -> None:
        """One after the other; an ``AioRpcError`` if the relay does not take it.

        Who stops waiting for it does not break off the stream, which others send through, too.
        """
        await asyncio.shield(self.hint(parcel))

    def hint(self, parcel: Parcel) -> asyncio.Future[None]:
        """Sends ``parcel`` if that is possible; nobody need wait for it."""
        task = asyncio.ensure_future(self._write(parcel))
        self.writing.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Future[None]) -> None:
        self.writing.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets to know

    async def _write(self, parcel: Parcel) -> None:
        async with self.lock:
            try:
                if not self.begun:
                    await self.call.write(self.address.model_dump_json().encode())
                    self.begun = True
                await self.call.write(parcel.pack())
            except asyncio.InvalidStateError:  # the relay has ended the stream
                code, details = await self.call.code(), await self.call.details()
                raise failure(
                    Code.UNAVAILABLE if code is Code.OK else code, details or "the relay is gone"
                ) from None

    async def finish(self) -> None:
        """All that was written is on its way."""
        if self.call.done():
            return
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self.call.done_writing()
                await self.call
