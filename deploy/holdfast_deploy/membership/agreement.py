"""How members agree on the next roster although any of them may crash at any instant: Paxos, once per roster.

The members of a roster vote about the next one. One that wants a change draws a ballot higher than all it has
heard of. First it asks for promises. A member that gives one writes it down before it answers: from then on
it takes no lower ballot, and it keeps all models that it has. Its answer says what it has voted for before,
and how far it is. With the promises of a majority the proposal is fixed: what was voted for in the highest
ballot, if anything was, else the proposer's own. Then members vote, again writing it down before answering.
What a majority has voted for in one ballot is decided. Two majorities have a member in common, so a later
ballot learns of what may have been decided, and proposes the same. Hence two halves never continue apart, and
no order of crashes and messages leads to two decisions (``tests/deploy/test_agreement.py`` tries
all of them).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from holdfast_deploy.federation import NodeConfig
from holdfast_deploy.membership.roster import AvailableModels, Checked, Order, Roster, next_roster
from holdfast_deploy.storage.messages import Number

# A count, then the name of the member that drew it; they are ordered.
Ballot = tuple[Annotated[int, Field(ge=0, lt=2**62)], str]
MOST_AHEAD = 2**20  # by how much a ballot may be above all before: no member is to use up the numbers

NO_BALLOT: Ballot = (0, "")


class Vote(Checked):
    """What a member has promised, and what it has voted for, about the roster called ``number``."""

    number: Number
    promised: Ballot = NO_BALLOT  # no lower ballot counts
    ballot: Ballot = NO_BALLOT  # in which it voted last
    value: Roster | None = None  # for what

    def promise(self, ballot: Ballot) -> Vote | None:
        """The promise to take no ballot below ``ballot``; None where a higher one was promised."""
        return self.model_copy(update={"promised": ballot}) if ballot >= self.promised else None

    def cast(self, ballot: Ballot, value: Roster) -> Vote | None:
        """The vote for ``value``; None where a higher ballot was promised."""
        if ballot < self.promised:
            return None
        return self.model_copy(update={"promised": ballot, "ballot": ballot, "value": value})


def is_majority(some: Collection[str], voters: Collection[str]) -> bool:
    """Whether ``some`` are more than half of the ``voters``."""
    return 2 * len(set(some) & set(voters)) > len(voters)


@dataclass
class Proposal:
    """One attempt to agree on what follows ``now``. It is lost in a crash, which does no harm."""

    now: Roster
    ballot: Ballot
    voters: list[str]
    votes: dict[str, Vote] = field(default_factory=dict)  # of those that have given a promise
    available: dict[str, AvailableModels] = field(default_factory=dict)
    value: Roster | None = None  # once it is fixed

    def promised(self, name: str, vote: Vote, available: AvailableModels) -> None:
        """``name`` has promised to take no lower ballot."""
        self.votes[name], self.available[name] = vote, available

    def fix(
        self, lost: Collection[str], order: Order | None, returning: Sequence[NodeConfig] = ()
    ) -> Roster | None:
        """What is to be voted for; None as long as too few have promised, or one that stays is missing."""
        if self.value is None and is_majority(self.votes, self.voters):
            before = max(self.votes.values(), key=lambda vote: vote.ballot)
            if before.value is not None:
                self.value = before.value
            else:
                gone = set(lost) - set(self.votes)
                self.value = next_roster(self.now, self.available, gone, order, returning)
        return self.value


class Signed(Checked):
    """A vote's signature with the key of the member's certificate; both empty without certificates."""

    certificate: str = Field(default="", max_length=8192)  # PEM
    signature: str = Field(default="", pattern="^([0-9a-f][0-9a-f])*$", max_length=256)


class Decision(Checked):
    """A roster that was decided, and the votes that show it, also to those that were not there."""

    roster: Roster
    ballot: Ballot
    votes: dict[str, Signed] = Field(max_length=10_000)
