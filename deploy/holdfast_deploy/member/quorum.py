"""Who is left out of a round: whoever has not answered by the deadline, once enough others have."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast_deploy.member.schedule import Due
    from holdfast_deploy.member.server import Server


class Quorum:
    """The decisions of a server. All of it runs on the event loop.

    Each is written down before the server averages, and counts for good: whatever the client sends or asks
    for that round is answered with "left out". The client then goes on as if it had not been in the cohort.
    """

    def __init__(self, server: Server, quorum: int, deadline: float) -> None:
        self.server, self.quorum, self.deadline = server, quorum, deadline
        store = server.store
        self.left_out = {(s, name) for s, e, name in store.decided() if store.decision(s, e, name) is False}
        last = max((message_round for message_round, _ in self.left_out), default=0)
        # Left out, and not heard of since: they still work on an earlier round, or are gone.
        self._behind = {name for message_round, name in self.left_out if message_round == last}

    def met(self, due: Due, missing: set[str], begun: float) -> bool:
        """Whether the round, ``begun`` then, may go on without the ``missing`` ones.

        Nobody waits until the deadline for those who still work on an earlier round.
        """
        message_round, seen = due.key[0], self.server.service.seen
        self._behind = {name for name in self._behind if seen.get(name, (0.0, 0))[1] < message_round}
        gone = sum((message_round, name) in self.left_out for name in due.names)
        if len(due.names) - gone - len(missing) < self.quorum:
            return False
        return missing <= self._behind or time.monotonic() - begun >= self.deadline

    async def go_on_without(self, due: Due, missing: set[str]) -> None:
        """Writes down that the ``missing`` ones are left out."""
        message_round, server = due.key[0], self.server
        for name in sorted(missing):
            if name in server.arrivals.get(due.key, ()):  # while the others were written down
                continue
            # First of all: what comes while there is no room does not count.
            self.left_out.add((message_round, name))
            await server.decide(message_round, due.key[1], name, False)
            self._behind.add(name)
            server.events.log("left out of a round", "warning", peer=name, round=message_round)
            server.events.audit("left out", peer=name, round=message_round)
