"""Keeps track of who takes part: hears of the others, carries out orders, continues without lost ones.

A ``MembershipService`` lives as long as the process, through all rosters. It asks every other member, every
few seconds, whether there is anything new; at a server, only nodes ask. How members agree is in
``agreement.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.membership.agreement import Decision, Proposal, is_majority
from holdfast_deploy.membership.links import MembershipLinks
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.membership.roster import RosterChanged
from holdfast_deploy.membership.view import MembershipView
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import BeyondRepairError, parse
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.protocol import (
    MEMBERSHIP,
    QUESTIONS,
    Answerer,
    Kind,
    Peer,
    Pieces,
    RefusedError,
    Sending,
    Wanted,
)
from holdfast_deploy.wire.retry import WaitLimitError
from holdfast_deploy.wire.server import Server

LONGEST_PAUSE = 5.0  # seconds between two questions to the same member
TURN = 4  # pauses after which the next member takes up what the one before has not brought to an end


class RemovedError(HoldfastError):
    """The coordinator has ordered the others to continue without this member."""

    exit_code = REFUSED

    def __init__(self, name: str, round: int) -> None:
        super().__init__(
            f"the coordinator has removed {name} after round {round}; once it has run 'holdfast federation "
            "add', start the same command again"
        )


class Working(Protocol):
    """A member at its rounds, in the roster under way."""

    @property
    def service(self) -> Answerer:
        """What it answers to others."""

    def awaits(self, name: str) -> bool:
        """Whether it cannot finish its rounds without ``name``."""

    def give_up(self, error: Exception) -> None:
        """Ends it with ``error``."""


class MembershipService:
    """How one member asks and answers about membership. All but ``start_again`` runs on the event loop."""

    def __init__(
        self,
        file: Federation,
        name: str,
        folder: Path,
        credentials: Credentials | None,
        events: Events,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.file, self.name, self.credentials = file, name, credentials
        self.events, self.loop = events, loop
        self.view = MembershipView(file, name, folder, credentials, events, loop.time, self._changed)
        self.member: Working | None = None
        self.mended = -1  # the roster that was begun because this member's files were
        self.due_since: float | None = None  # when a change became due that is not decided yet
        after = self.view.log.rules.remove_after
        self.pause = LONGEST_PAUSE if after is None else min(after / 5, LONGEST_PAUSE)
        self.links = MembershipLinks(name, credentials, events)
        self._task: asyncio.Task[None] | None = None
        asyncio.run_coroutine_threadsafe(self._begin(), loop).result()

    async def _begin(self) -> None:
        self.server = Server(lambda: self, self.credentials, self.events)
        if self.file.relay is not None:
            self.server.open_at(self.file.relay.name, self.file.relay.address)
        self._task = self.loop.create_task(self._keep())

    def close(self) -> None:
        """Ends it; what has to be remembered is on disk."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.links.close()
        await self.server.close()

    def _changed(self) -> None:
        """Another roster begins."""
        self.due_since = None
        if self.member is not None:
            self.member.give_up(RosterChanged())

    def lost(self, name: str) -> bool:
        """Whether ``name`` was not heard of for so long that members continue without it."""
        return self.view.presence.lost(name)

    # --- what it is asked ---------------------------------------------------------------------------------

    @property
    def answers(self) -> Mapping[str, Callable[[Peer, bytes], Awaitable[bytes]]]:
        """What is answered in all rosters, also while this member does not take part."""
        own = {MEMBERSHIP: self.serve}
        if self.member is not None:
            return {**self.member.service.answers, **own}
        return dict.fromkeys(QUESTIONS, self._take_no_part) | own

    def message(self, peer: Peer, wanted: Wanted) -> AbstractAsyncContextManager[Sending]:
        """Messages are of a roster, and fetched from the member that works in that one."""
        return self._working.service.message(peer, wanted)

    async def submit(self, peer: Peer, round: int, exchange: int, pieces: Pieces) -> bytes:
        """Likewise."""
        return await self._working.service.submit(peer, round, exchange, pieces)

    @property
    def _working(self) -> Working:
        if self.member is None:
            raise RefusedError(Kind.NOT_YET, self.view.problem or "it does not take part yet")
        return self.member

    async def _take_no_part(self, peer: Peer, body: bytes) -> bytes:
        raise RefusedError(Kind.NOT_YET, self.view.problem or "it does not take part yet")

    async def serve(self, peer: Peer, body: bytes) -> bytes:
        """The call ``Membership``: all who are, were, or are to become members may ask."""
        who = peer.name
        try:
            if who not in self.view.log.known_names:
                raise HoldfastError("not a member of the federation")
            if self.credentials is not None and peer.certificate:
                self.credentials.check(who, peer.certificate)  # it may have been revoked
            request: MembershipRequest = parse(MembershipRequest, body)
            if request.federation == self.file.id and request.decision is not None:
                self.view.take_up(request.decision)
            return self.view.answer(who, request).model_dump_json().encode()
        except HoldfastError as error:
            self.events.complain("refused", peer=who[:80] or "somebody", reason=str(error))
            raise RefusedError(Kind.DISAGREE, str(error)) from None
        except OSError as error:  # nothing is promised that could not be written down
            self.events.complain("membership", reason=str(error))
            raise RefusedError(Kind.NO_ROOM, "cannot be saved: no room, or no folder") from None

    # --- what it asks -------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._hear()
                await self._act()
            except (HoldfastError, OSError) as error:
                self.events.complain("membership", reason=str(error))
            await asyncio.sleep(self.pause)

    async def ask(self, name: str, request: MembershipRequest) -> MembershipReply | None:
        """What ``name``, perhaps this member itself, answers; None: nothing."""
        if name == self.name:
            return self.view.answer(name, request)
        known = [self.view.log.federation, self.file]
        federation = next(f for f in known if name in [member.name for member in f.members])
        return await self.links.ask(federation, name, request, max(2 * self.pause, 1.0))

    async def _hear(self) -> None:
        """Asks all others whether there is anything new."""
        self.view.look_for_order()
        request = self.view.request()
        self.view.hear(request, await self._ask_all(self.view.others(), request))

    async def _ask_all(
        self, names: list[str], request: MembershipRequest
    ) -> list[tuple[str, MembershipReply]]:
        """The answers of those who answer."""
        replies = await asyncio.gather(*(self.ask(name, request) for name in names))
        return [(name, reply) for name, reply in zip(names, replies, strict=True) if reply is not None]

    # --- what it proposes ---------------------------------------------------------------------------------

    def _returned(self) -> list[NodeConfig]:
        return self.view.presence.back(self.loop.time() - TURN * self.pause)

    def change_is_due(self) -> bool:
        """Whether members should change."""
        awaited = (lambda _: False) if self.member is None else self.member.awaits
        return bool(self._returned()) or self.view.presence.change_is_due(awaited)

    async def _act(self) -> None:
        """Proposes the next roster if one is due, and it is this member's turn."""
        view, now = self.view, self.loop.time()
        takes_part = view.admitted and (self.member is not None or view.presence.waits_for_another)
        if not (takes_part and self.name in view.log.voters and self.change_is_due()):
            self.due_since = None
            return
        self.due_since = self.due_since or now
        if now - self.due_since >= view.presence.turn * TURN * self.pause:
            await self._propose()

    async def _propose(self) -> None:
        view, log, roster, voters = self.view, self.view.log, self.view.log.roster, self.view.log.voters
        proposal = Proposal(roster, log.new_ballot(self.name), voters)
        for name, reply in await self._ask_voters(view.request(kind="promise", ballot=proposal.ballot)):
            view.take_over(name, reply)  # an order that came meanwhile would be void in the next roster
            if reply.vote is not None and reply.available is not None:
                proposal.promised(name, reply.vote, reply.available)
        lost, back = view.presence.all_lost, self._returned()
        value = view.value_of_server(lost, back) if view.serves else proposal.fix(lost, log.order, back)
        if value is None or log.roster is not roster:
            return
        log.check(value)
        request = view.request(kind="vote", ballot=proposal.ballot, value=value)
        agreed = [(name, reply.signed) for name, reply in await self._ask_voters(request)]
        votes = dict(agreed[: len(voters) // 2 + 1])  # as many as it takes
        if is_majority(votes, voters) and log.roster is roster:
            decision, others = Decision(roster=value, ballot=proposal.ballot, votes=votes), view.others()
            request = view.request(decision=decision)
            view.take_up(decision)
            await self._ask_all(others, request)

    async def _ask_voters(self, request: MembershipRequest) -> list[tuple[str, MembershipReply]]:
        """Those of the voters that grant what is asked for."""
        found = await self._ask_all(self.view.log.voters, request)
        return [(name, reply) for name, reply in found if reply.roster == request.roster and reply.granted]

    # --- where it cannot take part ------------------------------------------------------------------------

    async def admit(self, listen: str | None) -> None:
        """Waits until the member takes part; meanwhile it answers others, on ``listen`` if given."""
        since = self.loop.time()
        self.view.look_for_order()
        if listen is not None:
            await self.server.listener.open(listen)
        while self.view.outside:
            if (removal := self.view.removal) is not None:
                raise RemovedError(self.name, removal.first)
            if self.loop.time() - since > self.file.limits.wait:
                problem = self.view.problem or "fewer than half of the members could be reached"
                raise WaitLimitError(
                    f"{problem}; that is the limit (limits.wait). Start the same command again to go on"
                )
            await asyncio.sleep(min(self.pause, 0.2))

    def start_again(self, error: BeyondRepairError) -> None:
        """This member's files are beyond repair: it continues in a new roster, from a model that is intact.

        A disk on which that does not help either is not tried again.
        """
        number = self.view.log.roster.number
        if number == self.mended:
            raise error
        self.mended = number + 1
        self.view.kept.drop_damaged()
        self.loop.call_soon_threadsafe(self.view.presence.broken.add, self.name)
        self.view.explain(
            f"{error}. The members are asked to begin another roster, from models that are intact"
        )
