"""A message on its way to disk: what it says about itself is checked, then every number; and it is resumed.

Nothing that comes in is used before it is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.files import replace_durably
from holdfast_deploy.federation import Federation
from holdfast_deploy.storage.links import Dependencies
from holdfast_deploy.storage.messages import (
    CHUNK,
    LENGTH,
    LONGEST_HEADER,
    Header,
    MessageFile,
    TensorSpec,
    begin,
    expand,
    numpy_type,
    put,
    require_finite,
)
from holdfast_deploy.storage.store import message_name, remove
from holdfast_deploy.wire.protocol import LARGEST_PIECE, RefusedError

MOST_WAITING = 8 * CHUNK  # bytes that may wait while others are being checked


def check_header(
    header: Header,
    *,
    federation: str,
    sender: str,
    round: int,
    exchange: int,
    tensors: list[TensorSpec] | None,
    limit: float,
) -> None:
    """Whether a message is the one that was asked for."""
    for what, got, expected in (
        ("federation", header.federation, federation),
        ("sender", header.sender, sender),
        ("round", header.round, round),
        ("exchange", header.exchange, exchange),
    ):
        if got != expected:
            raise HoldfastError(f"{what}: expected {expected}, got {got}")
    if header.notes:
        raise HoldfastError("notes: expected none")
    if header.size > limit:
        raise HoldfastError(
            f"size: {header.size} bytes are over the limit of {limit:.0f} (limits.message_mib)"
        )
    if tensors is not None and header.tensors != tensors:
        raise HoldfastError(f"tensors: expected {_shapes(tensors)}, got {_shapes(header.tensors)}")


def _shapes(tensors: list[TensorSpec]) -> str:
    text = ", ".join(f"{t.name} {t.dtype} {t.shape}" for t in tensors[:4])
    return text + (" ..." if len(tensors) > 4 else "") or "none"


class Incoming:
    """A message under way into a file."""

    def __init__(self, header: Header, path: Path) -> None:
        self.header, self.path = header, path
        dtypes = {tensor.dtype for tensor in header.tensors}
        self.mixed = len(dtypes) > 1
        self.dtype = numpy_type(dtypes.pop()) if len(dtypes) == 1 else np.dtype(np.uint8)
        self.got, self.hash, self.squares, self.rest = 0, hashlib.sha256(), 0.0, b""
        self.temporary = path.with_name(f".{path.name}.{id(self):x}.partial")
        self.file = self.temporary.open("wb", buffering=0)
        try:
            begin(self.file, header)
        except OSError:  # no room: it is tried again, into another file
            self.discard()
            raise

    def take(self, piece: bytes) -> None:
        """The next bytes, as many as there are."""
        if self.got + len(piece) > self.header.size:
            raise HoldfastError(f"size: expected {self.header.size} bytes, got more")
        self.hash.update(piece)
        put(self.file, piece)
        self.got += len(piece)
        numbers = self.rest + piece if self.rest else piece
        whole = len(numbers) - len(numbers) % self.dtype.itemsize  # a piece may end within a number
        self.squares += require_finite(np.frombuffer(numbers, self.dtype, whole // self.dtype.itemsize))
        self.rest = numbers[whole:]

    def take_all(self, pieces: list[bytes]) -> None:
        """The next pieces."""
        for piece in pieces:
            self.take(piece)

    def finish(self, keep: bool) -> MessageFile:
        """The whole message; ``keep``: it has to survive a power cut."""
        if self.got != self.header.size:
            raise HoldfastError(f"cut off: after {self.got} of {self.header.size} bytes")
        if not self.header.seals(self.hash.hexdigest()):
            raise HoldfastError("the checksum does not match")
        if self.mixed:  # a piece may end within a number, so all are looked at together
            self.squares = MessageFile(self.temporary).squares()
        if keep:
            os.fsync(self.file.fileno())
            replace_durably(self.temporary, self.path)
        else:
            self.temporary.replace(self.path)
        return MessageFile(self.path, math.sqrt(self.squares))

    def discard(self) -> None:
        """Leaves no trace."""
        self.file.close()
        remove(self.temporary)


async def receive(
    pieces: AsyncIterator[bytes],
    incoming: Incoming,
    *,
    keep: bool,
    pool: ThreadPoolExecutor,
) -> MessageFile:
    """The rest of a message, ``pieces``; the next come in while some are being checked.

    If it breaks off, ``incoming`` holds all that came before, and can be continued from there.
    """
    loop = asyncio.get_running_loop()
    checking: asyncio.Future[Any] | None = None
    waiting, size = list[bytes](), 0
    try:
        async for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if checking is not None and (checking.done() or size > MOST_WAITING):
                await checking
                checking = None
            if checking is None and size >= CHUNK:  # to hand over less costs more than to check it
                checking = loop.run_in_executor(pool, incoming.take_all, waiting)
                waiting, size = [], 0
        if checking is not None:
            await checking
            checking = None
        last, waiting = waiting, []
        incoming.take_all(last)
        if keep:
            checking = loop.run_in_executor(pool, incoming.finish, True)
            finished: MessageFile = await asyncio.shield(checking)
            return finished
        return incoming.finish(False)
    finally:
        if checking is not None:
            await asyncio.wait([checking])
        if checking is None or (not checking.cancelled() and checking.exception() is None):
            incoming.take_all(waiting)


async def header_first(pieces: AsyncIterator[bytes]) -> tuple[bytes, AsyncIterator[bytes]]:
    """What a submitted message begins with, after its length; and all that follows."""
    held = b""
    async for piece in pieces:
        held += piece
        if len(held) < LENGTH.size:
            continue
        (length,) = LENGTH.unpack_from(held)
        if length > LONGEST_HEADER:
            raise HoldfastError(f"a header of {length} bytes is too long")
        end = LENGTH.size + length
        if len(held) >= end:
            return held[LENGTH.size : end], _behind(held[end:], pieces)
    raise HoldfastError("cut off: in the header")


async def _behind(first: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in pieces:
        yield piece


async def expanded(pieces: AsyncIterator[bytes], header: Header, offset: int) -> AsyncIterator[bytes]:
    """A message's bytes from ``offset`` on, out of compressed ``pieces``, each after its length."""
    held, got = bytearray(), offset
    async for piece in pieces:
        held += piece
        while len(held) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(held)
            if length > LARGEST_PIECE:
                raise HoldfastError(f"a compressed piece of {length} bytes is too long")
            if len(held) < LENGTH.size + length:
                break
            squeezed = bytes(held[LENGTH.size : LENGTH.size + length])
            del held[: LENGTH.size + length]
            expected = min(CHUNK, header.size - got)
            if not expected:
                raise HoldfastError(f"size: expected {header.size} bytes, got more")
            got += expected
            yield expand(squeezed, expected, header.itemsize)


@dataclass
class Arrivals:
    """What comes from ``peer``. All of it runs on the event loop."""

    federation: Federation
    peer: str
    inbox: Path
    dependencies: Dependencies

    def __post_init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, f"from-{self.peer}")
        self._part: Incoming | None = None  # the message that broke off last

    def close(self) -> None:
        """Forgets what has not arrived as a whole."""
        self._drop()
        self.pool.shutdown(wait=False)

    async def kept(self, round: int, exchange: int, tensors: list[TensorSpec]) -> MessageFile | None:
        """The message, if it came before, for a round that is computed again, and is still intact."""
        path = self.inbox / message_name(round, exchange, self.peer)
        if not path.exists():
            return None
        try:
            message = MessageFile(path)
            await asyncio.get_running_loop().run_in_executor(self.pool, message.verify)
            self._check(message.header, round, exchange, tensors)
            squares = await asyncio.get_running_loop().run_in_executor(self.pool, message.squares)
            message.norm = math.sqrt(squares)
        except HoldfastError:
            remove(path)  # it was not synced, and the peer may have it still
            return None
        self.dependencies.add(message.header.depends_on)
        return message

    async def take(
        self,
        round: int,
        exchange: int,
        tensors: list[TensorSpec],
        header: Header,
        pieces: Callable[[int], AsyncGenerator[bytes, None]],
    ) -> MessageFile:
        """The message of an exchange that ``header`` announces; ``pieces`` gives its bytes from one on."""
        self._check(header, round, exchange, tensors)
        incoming, lossless = self._begun(header, round, exchange), self.federation.compression == "lossless"
        # What a client of secure aggregation says rests on the answers, and must not be said on others, too.
        keep = self.federation.secure_aggregation is not None and exchange > 0
        try:
            async with aclosing(pieces(incoming.got)) as body:
                coming = expanded(body, header, incoming.got) if lossless else body
                received = await receive(coming, incoming, keep=keep, pool=self.pool)
        except (TimeoutError, RefusedError):  # the rest is asked for later
            raise
        except (HoldfastError, OSError):  # it is not good, or there is no room
            self._drop()
            raise
        self._drop()
        self.dependencies.add(received.header.depends_on)
        return received

    def _begun(self, header: Header, round: int, exchange: int) -> Incoming:
        """Where the bytes go: behind those that came before the connection broke, or into a new file."""
        if self._part is None or self._part.header != header:
            self._drop()
            path = self.inbox / message_name(round, exchange, self.peer)
            self._part = Incoming(header, path)
        return self._part

    def _drop(self) -> None:
        if self._part is not None:
            self._part.discard()
            self._part = None

    def _check(self, header: Header, round: int, exchange: int, tensors: list[TensorSpec]) -> None:
        """Whether a message is the one that was asked for."""
        check_header(
            header,
            federation=self.federation.id,
            sender=self.peer,
            round=round,
            exchange=exchange,
            tensors=tensors,
            limit=self.federation.limits.message_mib * 2**20,
        )
