"""One member's connections to the others: dialled directly, or through the relay."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.reading import Readings
from holdfast_deploy.relay.switchboard import Switchboard
from holdfast_deploy.storage.links import Dependencies, LinkDigests
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dialling import Wait
from holdfast_deploy.wire.links import Connection
from holdfast_deploy.wire.service import Service
from holdfast_deploy.wire.sharing import share_revocations

SHARING = 30.0  # seconds between two looks at others' lists of revoked certificates
SHARE_AGAIN = 1.0  # likewise, after somebody could not be reached; twice as long every time


class Connections:
    """One member's connections, each opened when it is first needed. All of it runs on the event loop."""

    def __init__(
        self,
        federation: Federation,
        name: str,
        start: str,
        inbox: Path,
        credentials: Credentials | None,
        events: Events,
        dependencies: Dependencies,
        link_digests: LinkDigests,
        readings: Readings,
        service: Service,
    ) -> None:
        self.federation, self.name, self.start, self.inbox = federation, name, start, inbox
        self.credentials, self.events = credentials, events
        self.dependencies, self.link_digests, self.service = dependencies, link_digests, service
        self.readings = readings
        self.links: dict[str, Connection] = {}
        self.waits: dict[str, Wait] = {}
        self.board: Switchboard | None = None
        self.turn = asyncio.Event()  # there is a new list of revoked certificates

    def to(self, peer: str) -> Connection:
        """The connection to ``peer``."""
        if peer not in self.links:
            self.links[peer] = Connection(
                self.federation,
                self.name,
                peer,
                self.start,
                self.inbox,
                self.credentials,
                self.events,
                self.waits,
                self.dependencies,
                self.link_digests,
                self.readings,
                self._relayed(peer),
            )
        return self.links[peer]

    def _relayed(self, peer: str) -> Any:
        """A channel to ``peer`` through the relay; None where it is dialled directly."""
        if not self.federation.relayed(self.name, peer):
            return None
        return self.relay().channel_to(peer)

    def relay(self) -> Switchboard:
        """The connection to the relay."""
        if self.board is None:
            if self.credentials is None:
                raise HoldfastError("a relay needs certificates: leave out --insecure")
            self.board = Switchboard(self.federation, self.name, self.credentials, self.events)
            self.board.open(self.service)
        return self.board

    async def share_revocations(self) -> None:
        """With everybody that this member has a connection to; never ends.

        ``watch_certificates`` notices what was learned, and calls for another turn.
        """
        again = SHARE_AGAIN
        while True:
            reached = await asyncio.gather(*map(share_revocations, list(self.links.values())))
            pause, again = again, min(2 * again, SHARING)
            if reached and all(reached):
                pause, again = SHARING, SHARE_AGAIN
            with suppress(TimeoutError):
                await asyncio.wait_for(self.turn.wait(), pause)
            self.turn.clear()

    def drop_revoked(self) -> None:
        """Ends what is under way with peers whose certificates hold no longer."""
        self.turn.set()
        for link in list(self.links.values()):
            link.drop_if_revoked()

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()
        if self.board is not None:
            await self.board.close()
