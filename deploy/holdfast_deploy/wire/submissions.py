"""What clients bring to a server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import SLOWEST, Federation
from holdfast_deploy.storage.links import Dependencies
from holdfast_deploy.storage.messages import Header
from holdfast_deploy.storage.store import message_name
from holdfast_deploy.wire.protocol import SILENCE, Pieces
from holdfast_deploy.wire.receiving import Incoming, expanded, receive


class Submissions(Protocol):
    """A server's view of its clients' messages."""

    def admit(self, header: Header) -> bool:
        """Whether the message is still needed; raises if it never was."""

    def arrived(self, header: Header, norm: float | None = None) -> None:
        """The message, of that norm, is in the inbox, for good unless its sender was left out meanwhile."""

    def left_out(self, sender: str, round: int) -> bool:
        """Whether the round is decided without ``sender``, see ``Quorum``, or it was never asked."""

    def counted(self, sender: str, round: int, exchange: int) -> bool:
        """Whether the round is over without what ``sender`` would say next, and its message counted."""


@dataclass
class Intake:
    """Messages on their way into the inbox, one of each client: a newer one ends the one before."""

    federation: Federation
    inbox: Path
    dependencies: Dependencies
    pool: ThreadPoolExecutor
    under_way: dict[str, asyncio.Timeout] = field(default_factory=dict)  # by sender

    async def take(self, header: Header, pieces: Pieces) -> float:
        """Receives the message that ``header`` announces; its norm, when it is safe on disk."""
        who, path = header.sender, self.inbox / message_name(header.round, header.exchange, header.sender)
        before = self.under_way.get(who)
        if before is not None and not before.expired():  # its connection broke, and we have not noticed
            before.reschedule(0.0)
        async with asyncio.timeout(SILENCE + header.size / SLOWEST) as until:
            self.under_way[who] = until
            try:
                incoming = Incoming(header, path)
                if self.federation.compression == "lossless":
                    pieces = expanded(pieces, header, 0)
                try:
                    message = await receive(pieces, incoming, keep=True, pool=self.pool)
                finally:
                    incoming.discard()
            finally:
                if self.under_way.get(who) is until:  # a newer one may have come and ended meanwhile
                    del self.under_way[who]
        try:
            self.dependencies.add(header.depends_on)
        except HoldfastError:
            path.unlink(missing_ok=True)
            raise
        return message.norm
