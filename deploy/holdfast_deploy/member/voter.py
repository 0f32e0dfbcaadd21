"""What a member knows about membership, and what it answers: every promise is on disk before it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast_deploy.agreement import MOST_AHEAD, Decision, Signed, Vote
from holdfast_deploy.epochs import Epoch, Order, Standing, first_epoch
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.member.history import History
from holdfast_deploy.member.statistics import diameter
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.kept_models import KeptModels
from holdfast_deploy.storage.ledger import Ledger
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.membership import MOST_DECISIONS, Reply, Word, sign_vote


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
        self.ledger = Ledger(folder / "membership", first_epoch(file))
        self.history = History(file, credentials, self.ledger.decisions)
        self.serves = file.server is not None and file.server.name == name
        if self.serves:
            self.ledger.remember(registered=True)
        self.highest = 0  # count of any ballot heard of
        self._take_up()

    def _take_up(self) -> None:
        """Looks after the latest epoch from here on."""
        self.federation: Federation = self.file.in_epoch(self.epoch)
        window = 0 if self.federation.led else diameter(self.federation.member_network)
        self.kept = KeptModels(self.place(), window, lambda: self.pending, self.file.limits)

    # --- where this member stands -----------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self.ledger.epoch

    @property
    def voters(self) -> list[str]:
        """Who decides about the next epoch: the server, or all nodes."""
        return self.history.voters

    @property
    def admitted(self) -> bool:
        """Whether this member takes part: it is one, and a majority knows that it has its folder."""
        takes_part = self.serves or self.name in self.epoch.names
        return takes_part and self.ledger.memory.registered and not self.ledger.behind

    @property
    def pending(self) -> bool:
        """Whether all models have to be kept, as the next epoch may begin with any of them."""
        return self.ledger.vote != Vote(number=self.epoch.number + 1)

    @property
    def order(self) -> Order | None:
        """What is ordered for the epoch under way."""
        order = self.ledger.memory.order
        return order if order is not None and order.epoch == self.epoch.number else None

    @property
    def standing(self) -> Standing:
        """What this member can go on from."""
        rounds, incarnation = self.kept.rounds, self.ledger.memory.incarnation
        if not rounds:
            return Standing(incarnation=incarnation)
        there, newest = set(rounds), rounds[-1]
        oldest = next(round for round in range(newest, -2, -1) if round - 1 not in there)
        earlier = [round for round in rounds if round < oldest][-1000:]
        return Standing(incarnation=incarnation, oldest=oldest, newest=newest, earlier=earlier)

    @property
    def known_names(self) -> set[str]:
        """Everybody who is, was, or is to become a member."""
        epochs = [self.ledger.first, *(decision.epoch for decision in self.ledger.decisions)]
        names = {name for epoch in epochs for name in epoch.names} | {m.name for m in self.file.members}
        return names | ({self.order.name} if self.order is not None else set())

    @property
    def former(self) -> dict[str, NodeConfig]:
        """Who was a member, is none now, and was not ordered away."""
        return self.history.former

    @property
    def removal(self) -> Epoch | None:
        """The epoch from which on the coordinator wants the others to go on without this member, if any."""
        found = None
        for decision in self.ledger.decisions:
            epoch = decision.epoch
            if self.name in epoch.names:
                found = None
            elif epoch.order is not None and self.name in epoch.order.removed:
                found = epoch
        return found

    def place(self, number: int | None = None) -> Path:
        """The folder of an epoch, by default of the one under way."""
        number = self.epoch.number if number is None else number
        return self.folder / f"epoch-{number}" if number else self.folder

    # --- what others ask --------------------------------------------------------------------------------

    def answer(self, who: str, word: Word) -> Reply:
        """What ``who`` is answered; a promise or a vote is written down before."""
        if word.federation != self.file.id:
            raise HoldfastError("another federation file; compare yours with theirs")
        self.consider(word.order)
        known = ""
        if word.epoch == self.epoch.number and who in [*self.epoch.names, *self.voters]:
            known = self._known(who, word.incarnation)
        signed = None
        if word.kind != "hello" and known and known == word.incarnation and who in self.voters:
            signed = self._vote(who, word) if self.admitted else None
        return Reply(
            epoch=self.epoch.number,
            decisions=self.ledger.decisions[word.epoch : word.epoch + MOST_DECISIONS],
            known=known,
            order=self.ledger.memory.order,
            granted=signed is not None,
            vote=self.ledger.vote,
            standing=self.standing,
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

    def _vote(self, who: str, word: Word) -> Signed | None:
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
        """Takes over an order of the coordinator for this epoch; whether it is new."""
        if order is None or order.epoch != self.epoch.number or not order.counts_before(self.order):
            return False
        self.check_order(order)
        self.ledger.remember(order=order)
        member = ", ".join([order.name, *order.also])
        self.events.log("an order of the coordinator", change=order.change, member=member, to=order.to)
        return True

    def check_order(self, order: Order) -> None:
        """Refuses what is no order of this federation's coordinator."""
        self.history.check_order(order)

    def check(self, after: Epoch) -> None:
        """Refuses an epoch that cannot follow the present one."""
        self.history.check(after)

    def learn(self, decision: Decision) -> None:
        """The next epoch is decided: writes it down."""
        after, before, pending = decision.epoch, self.epoch, self.order
        self.history.check_decision(decision)
        self.ledger.decide(decision)
        self._take_up()
        self.events.log(
            "a new epoch",
            epoch=after.number,
            round=after.first,
            members=after.names,
            joined=after.joined,
            without=sorted(set(before.names) - set(after.names)),
        )
        if pending is not None and (after.order is None or after.order.document != pending.document):
            reason = f"epoch {after.number} began without it: the coordinator has to give it once more"
            self.events.log("an order is void", "warning", order=pending.summary, reason=reason)
