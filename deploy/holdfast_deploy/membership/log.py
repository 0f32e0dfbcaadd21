"""What a member knows about membership, and what it answers: every promise is on disk before it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.membership.agreement import MOST_AHEAD, Decision, Signed, Vote
from holdfast_deploy.membership.history import History
from holdfast_deploy.membership.kept_models import KeptModels
from holdfast_deploy.membership.ledger import Ledger
from holdfast_deploy.membership.messages import MOST_DECISIONS, MembershipReply, MembershipRequest, sign_vote
from holdfast_deploy.membership.roster import AvailableModels, Order, Roster, first_roster
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.credentials import Credentials


class Voter:
    """One member's part in agreements; ``heard_of`` is called with the name of everybody who is here."""

    def __init__(
        self,
        file: Federation,
        name: str,
        folder: Path,
        credentials: Credentials | None,
        events: Events,
        heard_of: Callable[[str], None],
    ) -> None:
        assert file.membership is not None
        self.file, self.name, self.folder, self.rules = file, name, folder, file.membership
        self.credentials, self.events, self.heard_of = credentials, events, heard_of
        self.ledger = Ledger(folder / "membership", first_roster(file))
        self.history = History(file, credentials, self.ledger.decisions)
        self.serves = file.server is not None and file.server.name == name
        if self.serves:
            self.ledger.remember(registered=True)
        self.highest = 0  # count of any ballot heard of
        self._take_up()

    def _take_up(self) -> None:
        """Looks after the latest roster from here on."""
        self.federation: Federation = self.file.in_roster(self.roster)
        window = 0 if self.federation.led else self.federation.diameter
        self.kept = KeptModels(self.place(), window, lambda: self.pending, self.file.limits)

    # --- where this member stands -----------------------------------------------------------------------

    @property
    def roster(self) -> Roster:
        return self.ledger.roster

    @property
    def voters(self) -> list[str]:
        """Who decides about the next roster: the server, or all nodes."""
        return self.history.voters

    @property
    def admitted(self) -> bool:
        """Whether this member takes part: it is one, and a majority knows that it has its folder."""
        takes_part = self.serves or self.name in self.roster.names
        return takes_part and self.ledger.memory.registered and not self.ledger.behind

    @property
    def pending(self) -> bool:
        """Whether all models have to be kept, as the next roster may begin with any of them."""
        return self.ledger.vote != Vote(number=self.roster.number + 1)

    @property
    def order(self) -> Order | None:
        """What is ordered for the roster under way."""
        order = self.ledger.memory.order
        return order if order is not None and order.roster == self.roster.number else None

    @property
    def available(self) -> AvailableModels:
        """What this member can go on from."""
        rounds, incarnation = self.kept.rounds, self.ledger.memory.incarnation
        if not rounds:
            return AvailableModels(incarnation=incarnation)
        there, newest = set(rounds), rounds[-1]
        oldest = next(round for round in range(newest, -2, -1) if round - 1 not in there)
        earlier = [round for round in rounds if round < oldest][-1000:]
        return AvailableModels(incarnation=incarnation, oldest=oldest, newest=newest, earlier=earlier)

    @property
    def known_names(self) -> set[str]:
        """Everybody who is, was, or is to become a member."""
        rosters = [self.ledger.first, *(decision.roster for decision in self.ledger.decisions)]
        names = {name for roster in rosters for name in roster.names} | {m.name for m in self.file.members}
        return names | ({self.order.name} if self.order is not None else set())

    @property
    def former(self) -> dict[str, NodeConfig]:
        """Who was a member, is none now, and was not ordered away."""
        return self.history.former

    @property
    def removal(self) -> Roster | None:
        """The roster from which on the coordinator wants the others to go on without this member, if any."""
        found = None
        for decision in self.ledger.decisions:
            roster = decision.roster
            if self.name in roster.names:
                found = None
            elif roster.order is not None and self.name in roster.order.removed:
                found = roster
        return found

    def place(self, number: int | None = None) -> Path:
        """The folder of a roster, by default of the one under way."""
        number = self.roster.number if number is None else number
        return self.folder / f"roster-{number}" if number else self.folder

    # --- what others ask --------------------------------------------------------------------------------

    def answer(self, who: str, word: MembershipRequest) -> MembershipReply:
        """What ``who`` is answered; a promise or a vote is written down before."""
        if word.federation != self.file.id:
            raise HoldfastError("another federation file; compare yours with theirs")
        self.consider(word.order)
        known = ""
        if word.roster == self.roster.number and who in [*self.roster.names, *self.voters]:
            known = self._known(who, word.incarnation)
        signed = None
        if word.kind != "hello" and known and known == word.incarnation and who in self.voters:
            signed = self._vote(who, word) if self.admitted else None
        return MembershipReply(
            roster=self.roster.number,
            decisions=self.ledger.decisions[word.roster : word.roster + MOST_DECISIONS],
            known=known,
            order=self.ledger.memory.order,
            granted=signed is not None,
            vote=self.ledger.vote,
            available=self.available,
            signed=signed or Signed(),
        )

    def _known(self, who: str, incarnation: str) -> str:
        """The incarnation that ``who`` has here; the first one that it comes with is written down."""
        memory = self.ledger.memory
        if who == self.name:
            return memory.incarnation
        known = memory.known.get(who, "")
        if incarnation and not known:
            known = incarnation
            self.ledger.remember(known={**memory.known, who: known})
        if incarnation and known == incarnation:
            self.heard_of(who)
        return known

    def _vote(self, who: str, word: MembershipRequest) -> Signed | None:
        """The promise or the vote that is asked for; None where a higher ballot was promised."""
        before = max(self.highest, self.ledger.vote.promised[0])
        if word.ballot[1] != who or word.ballot[0] > before + MOST_AHEAD:
            raise HoldfastError(f"a ballot that {who} cannot have drawn: {word.ballot}, after {before}")
        self.highest = max(before, word.ballot[0])
        if word.kind == "promise":
            vote = self.ledger.vote.promise(word.ballot)
        else:
            if word.value is None:
                raise HoldfastError("a vote for nothing")
            self.check(word.value)
            vote = self.ledger.vote.cast(word.ballot, word.value)
        if vote is None:
            return None
        with self.kept.lock:  # from here on, no model is removed
            self.ledger.remember(vote=vote)
        if word.kind == "promise" or word.value is None:
            return Signed()
        return sign_vote(self.credentials, self.file.id, word.ballot, word.value)

    # --- what it learns ---------------------------------------------------------------------------------

    def consider(self, order: Order | None) -> bool:
        """Takes over an order of the coordinator for this roster; whether it is new."""
        if order is None or order.roster != self.roster.number or not order.counts_before(self.order):
            return False
        self.check_order(order)
        self.ledger.remember(order=order)
        member = ", ".join([order.name, *order.also])
        self.events.log("an order of the coordinator", change=order.change, member=member, to=order.to)
        return True

    def check_order(self, order: Order) -> None:
        """Refuses what is no order of this federation's coordinator."""
        self.history.check_order(order)

    def check(self, after: Roster) -> None:
        """Refuses a roster that cannot follow the present one."""
        self.history.check(after)

    def learn(self, decision: Decision) -> None:
        """The next roster is decided: writes it down."""
        after, before, pending = decision.roster, self.roster, self.order
        self.history.check_decision(decision)
        self.ledger.decide(decision)
        self._take_up()
        self.events.log(
            "a new roster",
            roster=after.number,
            round=after.first,
            members=after.names,
            joined=after.joined,
            without=sorted(set(before.names) - set(after.names)),
        )
        if pending is not None and (after.order is None or after.order.document != pending.document):
            reason = f"roster {after.number} began without it: the coordinator has to give it once more"
            self.events.log("an order is void", "warning", order=pending.summary, reason=reason)
