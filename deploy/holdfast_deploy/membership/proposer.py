"""When members should change, and who of them brings it about."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.membership.agreement import Decision, Proposal, is_majority
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest
from holdfast_deploy.membership.roster import Roster, led_roster

if TYPE_CHECKING:
    from holdfast_deploy.membership.service import Keeper

TURN = 4  # pauses after which the next member takes up what the one before has not brought to an end


class Proposer:
    """Proposes the next roster when one is due. All of it runs on the event loop."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.due_since: float | None = None  # when a change became due that is not decided yet

    def due(self) -> bool:
        """Whether the members should change: as ordered, as somebody has begun to, or to go on at all.

        They cannot go on without one that is lost, or whose files are beyond repair.
        """
        voter, member = self.keeper.voter, self.keeper.member
        if voter.pending or voter.order is not None or self._back():
            return True
        if self.keeper.broken & {*voter.roster.names, *voter.voters}:
            return True
        return member is not None and any(
            self.keeper.lost(name) and member.awaits(name) for name in voter.roster.names
        )

    def _back(self) -> list[NodeConfig]:
        """Former members that ask to be let in, where that is allowed without an order."""
        if not self.keeper.voter.rules.rejoin:
            return []
        recent = self.keeper.now - TURN * self.keeper.pause
        here = [name for name, when in self.keeper.returning.items() if when > recent]
        return [node for name, node in self.keeper.voter.former.items() if name in here]

    async def act(self) -> None:
        """Proposes the next roster if one is due, and it is this member's turn."""
        voter = self.keeper.voter
        taking_part = self.keeper.member is not None or self.keeper.waits_for_another
        if not (voter.admitted and self.keeper.name in voter.voters and taking_part and self.due()):
            self.due_since = None
            return
        self.due_since = self.due_since or self.keeper.now
        if self.keeper.now - self.due_since >= self._place() * TURN * self.keeper.pause:
            await self._propose()

    def _place(self) -> int:
        """How many others are to propose before this member: those first who wait for one that is lost."""
        voter, network = self.keeper.voter, self.keeper.voter.federation.member_network
        if voter.serves:
            return 0
        lost = {name for name in voter.voters if self.keeper.lost(name)}
        near = {voter.voters[j] for name in lost for j in network.neighbours(voter.voters.index(name))}
        present = [name for name in voter.voters if name not in lost]
        return sorted(present, key=lambda name: name not in near).index(self.keeper.name)

    async def _propose(self) -> None:
        voter, roster = self.keeper.voter, self.keeper.voter.roster
        ballot = (max(voter.highest, voter.ledger.vote.promised[0]) + 1, self.keeper.name)
        proposal = Proposal(roster, ballot, voter.voters)
        for name, reply in await self._ask_voters(self.keeper.word(kind="promise", ballot=ballot)):
            self.keeper.take_over(
                name, reply
            )  # an order that came meanwhile would be void in the next roster
            if reply.vote is not None and reply.available is not None:
                proposal.promised(name, reply.vote, reply.available)
        lost = {name for name in roster.names if self.keeper.lost(name)}
        value = self._of_server(lost) if voter.serves else proposal.fix(lost, voter.order, self._back())
        if value is None or voter.roster is not roster:
            return
        voter.check(value)
        word = self.keeper.word(kind="vote", ballot=ballot, value=value)
        agreed = [(name, reply.signed) for name, reply in await self._ask_voters(word)]
        votes = dict(agreed[: len(voter.voters) // 2 + 1])  # as many as it takes
        if is_majority(votes, voter.voters) and voter.roster is roster:
            decision, told = Decision(roster=value, ballot=ballot, votes=votes), self.keeper.others()
            word = self.keeper.word(decision=decision)
            self.keeper.take_up(decision)
            await asyncio.gather(*(self.keeper.ask(name, word) for name in told))

    async def _ask_voters(self, word: MembershipRequest) -> list[tuple[str, MembershipReply]]:
        """Those of the voters who give what is asked for."""
        voters = self.keeper.voter.voters
        replies = await asyncio.gather(*(self.keeper.ask(name, word) for name in voters))
        found = [(name, reply) for name, reply in zip(voters, replies, strict=True) if reply is not None]
        return [(name, reply) for name, reply in found if reply.roster == word.roster and reply.granted]

    def _of_server(self, lost: set[str]) -> Roster | None:
        """What a server decides by itself: it holds the model, and nobody can go on without it."""
        voter = self.keeper.voter
        before, available, order = voter.ledger.vote.value, voter.available, voter.order
        first = available.newest if order is None or order.to is None else order.to
        if before is not None or first is None or not available.has(first):
            return before
        return led_roster(voter.roster, first, lost, order, self._back())
