"""How members ask one another who takes part: at their addresses, or through the relay, in all rosters."""

from __future__ import annotations

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import LONGEST_HEADER, parse
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dial import Unreachable, Way, way_to
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.protocol import MEMBERSHIP, NAME_KEY, RefusedError


class MembershipLinks:
    """The ways from ``name`` to all who are, were, or are to become members. It runs on the event loop."""

    def __init__(self, name: str, credentials: Credentials | None, events: Events) -> None:
        self.name, self.credentials, self.events = name, credentials, events
        self.lines: dict[Way, Line] = {}  # members may move

    async def ask(
        self, federation: Federation, peer: str, word: MembershipRequest, timeout: float
    ) -> MembershipReply | None:
        """What ``peer``, a member of ``federation``, answers; None: nothing, or nothing that makes sense."""
        way = way_to(federation, self.name, peer)
        line = self.lines.setdefault(way, Line(way, self.credentials))
        said = {} if self.credentials is not None else {NAME_KEY: self.name}
        body = word.model_dump_json().encode()
        try:
            text = await line.ask(MEMBERSHIP, body, said, timeout=timeout, most=LONGEST_HEADER)
            reply: MembershipReply = parse(MembershipReply, text)
        except (Unreachable, RefusedError, TimeoutError):
            return None
        except HoldfastError as error:
            self.events.complain("a message was refused", peer=peer, reason=str(error))
            return None
        return reply

    async def close(self) -> None:
        for line in self.lines.values():
            await line.close()
