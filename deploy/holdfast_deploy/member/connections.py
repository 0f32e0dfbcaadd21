"""One member's connections to the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.reading import Readings
from holdfast_deploy.storage.links import Dependencies, LinkDigests
from holdfast_deploy.wire.client import Connection
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.retry import Wait
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
    ) -> None:
        self.federation, self.name, self.start, self.inbox = federation, name, start, inbox
        self.credentials, self.events = credentials, events
        self.dependencies, self.link_digests = dependencies, link_digests
        self.readings = readings
        self.links: dict[str, Connection] = {}
        self.waits: dict[str, Wait] = {}
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
            )
        return self.links[peer]

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
