"""How members ask one another who takes part: at their addresses, or through the relay, in all rosters."""

from __future__ import annotations

from typing import Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay.switchboard import Switchboard, members_scope
from holdfast_deploy.storage.messages import LONGEST_HEADER, parse
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dialling import open_channel
from holdfast_deploy.wire.protocol import NAME_KEY, SERVICE, Answerer


class MembershipLinks:
    """The ways from ``name`` to all who are, were, or are to become members; it runs on the event loop."""

    def __init__(self, file: Federation, name: str, credentials: Credentials | None, events: Events) -> None:
        self.file, self.name, self.credentials, self.events = file, name, credentials, events
        self.channels: dict[tuple[str, str], Any] = {}  # by name and address: members may move
        self.board: Switchboard | None = None

    def open(self, service: Answerer | None = None) -> None:
        """Connects to the relay, if there is one; ``service`` answers who asks through it."""
        if self.file.relay is None:
            return
        if self.credentials is None:
            raise HoldfastError("a relay needs certificates: leave out --insecure")
        scope = members_scope(self.file)
        self.board = Switchboard(self.file, self.name, self.credentials, self.events, scope)
        self.board.open(service)

    def channel(self, federation: Federation, peer: str) -> Any:
        """To ``peer``, a member of ``federation``, which is that of the file or of a roster."""
        if self.board is not None and federation.relayed(self.name, peer):
            return self.board.channel_to(peer)
        where = (peer, federation.member(peer).address)
        if where not in self.channels:
            self.channels[where] = open_channel(federation, peer, self.credentials)
        return self.channels[where]

    async def ask(
        self, federation: Federation, peer: str, word: MembershipRequest, timeout: float
    ) -> MembershipReply | None:
        """What ``peer`` answers; None: nothing, or nothing that makes sense."""
        try:
            channel = self.channel(federation, peer)
            return await _ask(channel, self.name, word, self.credentials is not None, timeout)
        except HoldfastError as error:
            self.events.complain("a message was refused", peer=peer, reason=str(error))
            return None

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        if self.board is not None:
            await self.board.close()


async def _ask(
    channel: Any, name: str, word: MembershipRequest, secure: bool, timeout: float
) -> MembershipReply | None:
    """What the member behind ``channel`` answers to ``name``; None: nothing."""
    call = channel.unary_unary(f"/{SERVICE}/Membership")
    metadata = None if secure else ((NAME_KEY, name),)
    try:
        text = await call(word.model_dump_json().encode(), metadata=metadata, timeout=timeout)
    except (grpc.aio.AioRpcError, TimeoutError):
        return None
    if len(text) > 4 * LONGEST_HEADER:
        raise HoldfastError("an answer about membership is too long")
    reply: MembershipReply = parse(MembershipReply, text)
    return reply
