"""The messages of one peer on their way into the inbox: checked, kept for a repeated round, and resumed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.storage.links import Dependencies
from holdfast_deploy.storage.messages import UNSEALED, Header, MessageFile, TensorSpec
from holdfast_deploy.storage.store import message_name, remove
from holdfast_deploy.wire.incoming import Incoming, check_header, receive


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

    def so_far(self, round: int, exchange: int) -> tuple[int, str]:
        """How many bytes of a message are here from before, and the digest of all of its content."""
        part = self._part
        if part is None or (part.header.round, part.header.exchange) != (round, exchange):
            return 0, UNSEALED
        return part.got, part.header.content

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
        offset: int,
        pieces: AsyncIterator[bytes],
    ) -> MessageFile:
        """The message of an exchange that ``header`` announces, whose ``pieces`` begin at ``offset``."""
        self._check(header, round, exchange, tensors)
        incoming = self._resume(header, offset, round, exchange)
        # What a client of secure aggregation says rests on the answers, and must not be said on others, too.
        keep = self.federation.secure_aggregation is not None and exchange > 0
        try:
            received = await receive(pieces, incoming, keep=keep, pool=self.pool)
        except TimeoutError:  # the peer fell silent, which is an OSError, too: what came can be gone on from
            raise
        except (HoldfastError, OSError):  # it is not good, or there is no room
            self._drop()
            raise
        self._drop()
        self.dependencies.add(received.header.depends_on)
        return received

    def _resume(self, header: Header, offset: int, round: int, exchange: int) -> Incoming:
        """Where the pieces go: behind those that came before the connection broke, or into a new file."""
        known = self._part
        if known is not None and known.header == header and known.got == offset > 0:
            return known
        self._drop()
        if offset:
            raise HoldfastError(f"offset: expected 0, got {offset}")
        squeezed = self.federation.compression == "lossless"
        path = self.inbox / message_name(round, exchange, self.peer)
        self._part = Incoming(header, path, squeezed)
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
