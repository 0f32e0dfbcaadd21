"""Everything that comes in is checked before it is used: what it says about itself, then every number."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.files import replace_durably
from holdfast_deploy.storage.messages import (
    CHUNK,
    Header,
    MessageFile,
    TensorSpec,
    begin,
    expand,
    numpy_type,
    put,
    require_finite,
)
from holdfast_deploy.storage.store import remove

MOST_WAITING = 8  # pieces that may wait while others are being checked


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

    def __init__(self, header: Header, path: Path, squeezed: bool) -> None:
        self.header, self.path, self.squeezed = header, path, squeezed
        dtypes = {tensor.dtype for tensor in header.tensors}
        self.mixed = len(dtypes) > 1
        self.dtype = numpy_type(dtypes.pop()) if len(dtypes) == 1 else np.dtype(np.uint8)
        self.got, self.hash, self.squares = 0, hashlib.sha256(), 0.0
        self.temporary = path.with_name(f".{path.name}.{id(self):x}.partial")
        self.file = self.temporary.open("wb", buffering=0)
        try:
            begin(self.file, header)
        except OSError:  # no room: it is tried again, into another file
            self.discard()
            raise

    def take(self, frame: bytes) -> None:
        """The next piece."""
        expected = min(CHUNK, self.header.size - self.got)
        if self.squeezed and expected:
            frame = expand(frame, expected, self.header.itemsize)
        if len(frame) != expected or not expected:
            raise HoldfastError(f"size of a piece: expected {expected} bytes, got {len(frame)}")
        self.hash.update(frame)
        self.squares += require_finite(np.frombuffer(frame, self.dtype))
        put(self.file, frame)
        self.got += len(frame)

    def take_all(self, frames: list[bytes]) -> None:
        """The next pieces."""
        for frame in frames:
            self.take(frame)

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
    frames: AsyncIterator[bytes],
    incoming: Incoming,
    *,
    keep: bool,
    pool: ThreadPoolExecutor,
) -> MessageFile:
    """The rest of a message, ``frames``; the next come in while some are being checked.

    If it breaks off, ``incoming`` holds all that came before, and can go on from there.
    """
    loop = asyncio.get_running_loop()
    checking: asyncio.Future[Any] | None = None
    waiting: list[bytes] = []
    try:
        async for frame in frames:
            waiting.append(frame)
            if checking is not None and (checking.done() or len(waiting) == MOST_WAITING):
                await checking
                checking = None
            if checking is None:
                checking = loop.run_in_executor(pool, incoming.take_all, waiting)
                waiting = []
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
