"""Keeps track of who takes part: hears of the others, carries out orders, goes on without who is lost.

A ``Keeper`` lives as long as the process, through all rosters. It asks every other member, every few
seconds, whether there is anything new; at a server, only nodes ask. How members agree is in ``agreement.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.agreement import Decision, is_majority
from holdfast_deploy.membership.links import MembershipLinks
from holdfast_deploy.membership.log import Voter
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.membership.proposer import Proposer
from holdfast_deploy.membership.roster import Order, Roster
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import BeyondRepairError, parse
from holdfast_deploy.storage.store import remove
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.protocol import Kind, Peer, Pieces, RefusedError

if TYPE_CHECKING:
    from holdfast_deploy.member.base import Member

LONGEST_PAUSE = 5.0  # seconds between two questions to the same member


class RosterChanged(Exception):  # noqa: N818 - not an error
    """The members have agreed on another roster: the member goes on in that one."""


class Keeper:
    """Membership as one member sees it. All but ``begin_anew`` runs on the event loop."""

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
        self.heard: dict[str, float] = {}  # when each member was last heard of
        self.began = self.now  # everybody has time from here on to be heard of
        self.voter = Voter(file, name, folder, credentials, events, self._heard_of)
        self.member: Member | None = None
        # The latest roster that most of its members were heard to be in, since this process began: they would
        # have known of an order for the next one.
        self.confirmed = -1
        self.problem = ""  # why it does not take part
        self.broken: set[str] = set()  # whose files are beyond repair: they can go on in another roster only
        self.returning: dict[str, float] = {}  # former members, and when each last asked to be let in
        self.mended = -1  # the roster that was begun because this member's files were
        after = self.voter.rules.remove_after
        self.pause = LONGEST_PAUSE if after is None else min(after / 5, LONGEST_PAUSE)
        self.proposer = Proposer(self)
        self.links = MembershipLinks(file, name, credentials, events)
        self._task: asyncio.Task[None] | None = None
        asyncio.run_coroutine_threadsafe(self._begin(), loop).result()

    async def _begin(self) -> None:
        self.links.open(self)
        self._task = self.loop.create_task(self._keep())

    def close(self) -> None:
        """Ends it; what has to be remembered is on disk."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()

    async def _close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self.links.close()

    @property
    def now(self) -> float:
        return self.loop.time()

    def _heard_of(self, name: str) -> None:
        self.heard[name] = self.now

    def lost(self, name: str) -> bool:
        """Whether ``name`` was not heard of for so long that members go on without it.

        At the very beginning, members come as they like: who was never there is waited for.
        """
        after, voter = self.voter.rules.remove_after, self.voter
        if after is None or name == self.name:
            return False
        if voter.roster.number == 0 and name not in voter.ledger.memory.known:
            return False
        return self.now - max(self.heard.get(name, 0.0), self.began) > after

    # --- what it is asked -------------------------------------------------------------------------------

    @property
    def answers(self) -> dict[str, Callable[[Peer, bytes], Awaitable[bytes]]]:
        """What is answered in all rosters, also while this member does not take part."""
        return {"Membership": self.serve, "Status": self._tell_status}

    async def fetch(self, peer: Peer, body: bytes) -> AsyncGenerator[bytes, None]:
        """Messages are of a roster, and fetched from the ``Member`` of that one."""
        self._take_no_part()
        yield b""

    async def submit(self, peer: Peer, pieces: Pieces) -> bytes:
        """Likewise."""
        self._take_no_part()
        return b""

    def _take_no_part(self) -> None:
        raise RefusedError(Kind.NOT_YET, "it does not take part yet")

    async def _tell_status(self, peer: Peer, body: bytes) -> bytes:
        if self.member is None:
            raise RefusedError(Kind.NOT_YET, self.problem or "it does not take part yet")
        return await self.member.service.tell_status(peer, body)

    async def serve(self, peer: Peer, body: bytes) -> bytes:
        """The call ``Membership``: anybody may ask who is, was, or is to become a member."""
        who = peer.name
        try:
            if who not in self.voter.known_names:
                raise HoldfastError("not a member of the federation")
            if self.credentials is not None and peer.certificate:
                self.credentials.check(who, peer.certificate)  # it may have been revoked
            word: MembershipRequest = parse(MembershipRequest, body)
            if word.federation == self.file.id and word.decision is not None:
                self.take_up(word.decision)
            reply = self.voter.answer(who, word)
            if word.broken and word.roster == reply.roster and reply.known == word.incarnation:
                self.broken.add(who)
            if word.incarnation and word.roster == reply.roster and who in self.voter.former:
                self.returning[who] = self.now
            return reply.model_dump_json().encode()
        except HoldfastError as error:
            self.events.complain("refused", peer=who[:80] or "somebody", reason=str(error))
            raise RefusedError(Kind.DISAGREE, str(error)) from None
        except OSError as error:  # nothing is promised that could not be written down
            self.events.complain("membership", reason=str(error))
            raise RefusedError(Kind.NO_ROOM, "cannot be saved: no room, or no folder") from None

    # --- what it asks -----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            try:
                await self._hear()
                await self.proposer.act()
            except (HoldfastError, OSError) as error:
                self.events.complain("membership", reason=str(error))
            await asyncio.sleep(self.pause)

    def others(self) -> list[str]:
        """Whom to ask: the server, or all nodes; who does not take part asks also those of the file."""
        if self.file.server is not None:
            return [] if self.voter.serves else [self.file.server.name]
        names = self.voter.roster.names
        everybody = dict.fromkeys(names if self.voter.admitted else [*names, *self.file.names])
        return [name for name in everybody if name != self.name]

    async def ask(self, name: str, word: MembershipRequest) -> MembershipReply | None:
        """What ``name``, perhaps this member itself, answers; None: nothing."""
        if name == self.name:
            return self.voter.answer(name, word)
        known = [self.voter.federation, self.file]
        federation = next(f for f in known if name in [member.name for member in f.members])
        return await self.links.ask(federation, name, word, max(2 * self.pause, 1.0))

    def word(self, **fields: Any) -> MembershipRequest:
        """What this member says, beside what it says about itself."""
        memory, roster = self.voter.ledger.memory, self.voter.roster.number
        about: dict[str, Any] = {"incarnation": memory.incarnation, "order": memory.order}
        broken = self.name in self.broken
        return MembershipRequest(federation=self.file.id, roster=roster, broken=broken, **about, **fields)

    async def _hear(self) -> None:
        """Asks all others whether there is anything new."""
        self.look_for_order()
        voter, others, word = self.voter, self.others(), self.word()
        replies = await asyncio.gather(*(self.ask(name, word) for name in others))
        know_us = {self.name}
        for name, reply in zip(others, replies, strict=True):
            if reply is None:
                continue
            if reply.roster == word.roster:
                folder = "" if reply.available is None else reply.available.incarnation
                if voter.ledger.memory.known.get(name, folder) == folder:  # else it has lost its own
                    self._heard_of(name)
                if reply.known == word.incarnation:
                    know_us.add(name)
                elif reply.known and not voter.ledger.memory.registered:
                    way = self._way_in("replace")
                    self._explain(f"{self.name} has lost its folder, since others know another: {way}")
            self.take_over(name, reply)
        now = voter.roster.number
        there = {n for n, reply in zip(others, replies, strict=True) if reply and reply.roster == now}
        if is_majority(there, voter.voters):
            self.confirmed = now
        if voter.roster.number == word.roster and is_majority(know_us, voter.voters):
            voter.ledger.remember(registered=True)
        if self.name not in voter.roster.names and not voter.serves:
            self._explain(
                f"{self.name} is not a member in roster {voter.roster.number}: {self._way_in('add')}"
            )

    def take_over(self, name: str, reply: MembershipReply) -> None:
        """What ``name`` knows of orders and decisions; if it lies, that does not make us deaf for others."""
        try:
            self.voter.consider(reply.order)
            for decision in reply.decisions:
                self.learn(decision)
        except HoldfastError as error:
            self.events.complain("membership", peer=name, reason=str(error))

    def _way_in(self, change: str) -> str:
        ordered = f"the coordinator has to run 'holdfast federation {change}' for it"
        if not self.voter.rules.rejoin:
            return ordered
        return f"others take it in once they have left out the old one (membership.rejoin), or {ordered}"

    def look_for_order(self) -> None:
        """The file ``membership/order.json``, which the member's people have put there.

        One that says nothing yet may still be being copied; it keeps nobody from hearing of the others.
        """
        path, roster = self.voter.ledger.folder / "order.json", self.voter.roster.number
        if not path.exists():
            return
        try:
            order: Order = parse(Order, path.read_bytes())
            remove(path)
            if order.federation == self.file.id and order.roster != roster:
                raise HoldfastError(
                    f"an order for roster {order.roster}, but this is {roster}: ask for a new one"
                )
            self.voter.check_order(order)
            self.voter.consider(order)
        except (HoldfastError, OSError) as error:
            self.events.complain("membership", reason=str(error), file=str(path))

    def _explain(self, problem: str) -> None:
        if self.problem != problem:
            self.problem = problem
            self.events.log("not taking part", "warning", reason=problem)

    def take_up(self, decision: Decision) -> None:
        """Learns what was decided this moment: there is nothing later that others could tell."""
        self.learn(decision)
        if decision.roster.number == self.voter.roster.number:
            self.confirmed = decision.roster.number

    def learn(self, decision: Decision) -> None:
        """If it is about the next roster, the member goes on in that one."""
        if decision.roster.number != self.voter.roster.number + 1:
            return
        self.voter.learn(decision)
        self.began, self.proposer.due_since, self.problem = self.now, None, ""
        self.broken.clear()
        self.returning.clear()
        if self.member is not None:
            self.member.give_up(RosterChanged())

    # --- where it cannot take part ----------------------------------------------------------------------

    @property
    def waits_for_another(self) -> bool:
        """Whether this member takes part in the next roster only: its files are gone, or all go back."""
        order = self.voter.order
        return self.name in self.broken or (order is not None and order.change == "rollback")

    @property
    def removal(self) -> Roster | None:
        """Where the coordinator has removed this member, and has not ordered it to be added again."""
        now, pending = self.voter.roster, self.voter.order
        back = pending is not None and pending.newcomer is not None and pending.name == self.name
        return self.voter.removal if self.confirmed == now.number and not back else None

    def begin_anew(self, error: BeyondRepairError) -> None:
        """This member's files are beyond repair: it goes on in a new roster, from a model that is intact.

        A disk on which that does not help either is not tried again.
        """
        number = self.voter.roster.number
        if number == self.mended:
            raise error
        self.mended = number + 1
        self.voter.kept.drop_damaged()
        self.loop.call_soon_threadsafe(self.broken.add, self.name)
        self._explain(f"{error}. The members are asked to begin another roster, from models that are intact")
