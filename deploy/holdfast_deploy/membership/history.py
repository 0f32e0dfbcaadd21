"""All rosters so far, as anybody can check who has the federation file and its authority's certificate."""

from __future__ import annotations

from holdfast.core.errors import HoldfastError
from holdfast_deploy import keys
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.membership.agreement import Decision, is_majority
from holdfast_deploy.membership.messages import check_vote
from holdfast_deploy.membership.roster import Order, Roster, check_change, first_roster
from holdfast_deploy.wire.credentials import Credentials


class History:
    """The rosters of the federation ``file`` after ``decisions``; the list may grow elsewhere."""

    def __init__(self, file: Federation, credentials: Credentials | None, decisions: list[Decision]) -> None:
        assert file.membership is not None
        self.file, self.credentials, self.decisions = file, credentials, decisions
        self.rules, self.first = file.membership, first_roster(file)

    @property
    def roster(self) -> Roster:
        """The latest."""
        return self.decisions[-1].roster if self.decisions else self.first

    @property
    def voters(self) -> list[str]:
        """Who decides about the next roster: the server, or all nodes."""
        return [self.file.server.name] if self.file.server is not None else self.roster.names

    @property
    def former(self) -> dict[str, NodeConfig]:
        """Who was a member, is none now, and was not ordered away."""
        known = {node.name: node for node in self.first.nodes}
        for decision in self.decisions:
            known |= {node.name: node for node in decision.roster.nodes}
            for name in () if (order := decision.roster.order) is None else order.removed:
                known.pop(name, None)
        return {name: node for name, node in known.items() if name not in self.roster.names}

    def check_order(self, order: Order) -> None:
        """Refuses what is no order of this federation's coordinator."""
        if order.federation != self.file.id:
            raise HoldfastError("an order for another federation")
        if self.file.coordinator is None:
            raise HoldfastError("an order, and the federation file names no coordinator's key")
        if order.signature is None:
            raise HoldfastError("an order that nobody has signed")
        keys.verify("membership", order.document, order.signature, self.file.coordinator)

    def check(self, after: Roster) -> None:
        """Refuses a roster that cannot follow the latest one."""
        if after.first > self.file.rounds:
            raise HoldfastError(
                f"roster {after.number} from round {after.first} does not follow: there is none"
            )
        check_change(self.roster, after, self.rules, self.former)
        if after.order is not None:
            self.check_order(after.order)
        self.file.in_roster(after)  # complains if there is no such network

    def check_decision(self, decision: Decision) -> None:
        """Refuses what a majority has not voted for, or could not."""
        self.check(decision.roster)
        if not is_majority(decision.votes, self.voters):
            raise HoldfastError(f"roster {decision.roster.number}: no majority has voted for it")
        for name in set(decision.votes) & set(self.voters):
            check_vote(self.credentials, self.file.id, name, decision.votes[name], decision)

    def follow(self, decisions: list[Decision]) -> bool:
        """Takes over those that come next, each checked; whether there are any."""
        before = len(self.decisions)
        for decision in decisions:
            if decision.roster.number == self.roster.number + 1:
                self.check_decision(decision)
                self.decisions.append(decision)
        return len(self.decisions) > before
