"""Membership as one member sees it: what it knows, what it answers, and what it learns from others.

Nothing here talks to others: that does the ``MembershipService``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.membership.agreement import Decision, Signed, is_majority
from holdfast_deploy.membership.kept_models import KeptModels
from holdfast_deploy.membership.log import MembershipLog
from holdfast_deploy.membership.messages import MOST_DECISIONS, MembershipReply, MembershipRequest
from holdfast_deploy.membership.presence import Presence
from holdfast_deploy.membership.roster import Order, Roster, led_roster, roster_folder
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.storage.store import remove
from holdfast_deploy.wire.credentials import Credentials


class MembershipView:
    """The log of the member ``name``, who is here, and its models. ``now``: the clock (seconds).

    ``changed`` is called where another roster begins.
    """

    def __init__(
        self,
        file: Federation,
        name: str,
        folder: Path,
        credentials: Credentials | None,
        events: Events,
        now: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self.file, self.name, self.folder, self.events, self.changed = file, name, folder, events, changed
        self.serves = file.server is not None and file.server.name == name
        self.log = MembershipLog(file, credentials, folder / "membership")
        if self.serves:
            self.log.remember(registered=True)
        self.presence = Presence(self.log, name, now)
        self.kept = self._models()
        # The latest roster that most of its members were heard to be in, since this process began: they would
        # have known of an order for the next one.
        self.confirmed = -1
        self.problem = ""  # why it does not take part

    def _models(self) -> KeptModels:
        """Those of the roster under way."""
        number, federation = self.log.roster.number, self.log.federation
        window = 0 if federation.led else federation.diameter
        pinned = partial(self.log.pinned, number)
        return KeptModels(roster_folder(self.folder, number), window, pinned, self.file.limits)

    @property
    def admitted(self) -> bool:
        """Whether this member takes part: it is one, and a majority knows that it has its folder."""
        takes_part = self.serves or self.name in self.log.roster.names
        return takes_part and self.log.memory.registered and not self.log.behind

    @property
    def outside(self) -> bool:
        """Whether it has to wait: until it is let in, or until the roster begins that it can continue in."""
        return not self.admitted or self.presence.waits_for_another

    @property
    def removal(self) -> Roster | None:
        """Where the coordinator has removed this member, and has not ordered it to be added again."""
        now, pending = self.log.roster, self.log.order
        back = pending is not None and pending.newcomer is not None and pending.name == self.name
        return self.log.removal_of(self.name) if self.confirmed == now.number and not back else None

    def value_of_server(self, lost: Collection[str], back: Sequence[NodeConfig]) -> Roster | None:
        """What a server decides by itself: it holds the model, and no node can continue without it."""
        before, order = self.log.vote.value, self.log.order
        available = self.kept.available(self.log.memory.incarnation)
        first = available.newest if order is None or order.to is None else order.to
        if before is not None or first is None or not available.has(first):
            return before
        return led_roster(self.log.roster, first, lost, order, back)

    # --- what it says and is asked ------------------------------------------------------------------------

    def request(self, **fields: Any) -> MembershipRequest:
        """What this member says, beside what it says about itself."""
        memory, number = self.log.memory, self.log.roster.number
        about: dict[str, Any] = {"incarnation": memory.incarnation, "order": memory.order}
        about["broken"] = self.name in self.presence.broken
        return MembershipRequest(federation=self.file.id, roster=number, **about, **fields)

    def others(self) -> list[str]:
        """Whom to ask: the server, or all nodes; a member outside asks also those of the file."""
        if self.file.server is not None:
            return [] if self.serves else [self.file.server.name]
        names = self.log.roster.names
        asked = dict.fromkeys(names if self.admitted else [*names, *self.file.names])
        return [name for name in asked if name != self.name]

    def answer(self, who: str, request: MembershipRequest) -> MembershipReply:
        """What ``who`` is answered; a promise or a vote is written down before."""
        log, same = self.log, request.roster == self.log.roster.number
        if request.federation != self.file.id:
            raise HoldfastError("another federation file; compare yours with theirs")
        self.consider(request.order)
        known = ""
        if same and who in [*log.roster.names, *log.voters]:
            known = self._meet(who, request.incarnation)
        is_known = known != "" and known == request.incarnation
        if request.broken and is_known:
            self.presence.broken.add(who)
        if same and request.incarnation and who in log.former:
            self.presence.returning[who] = self.presence.now()
        grants = request.kind != "hello" and is_known and who in log.voters and self.admitted
        signed = self.grant(who, request) if grants else None
        return MembershipReply(
            roster=log.roster.number,
            decisions=log.decisions[request.roster : request.roster + MOST_DECISIONS],
            known=known,
            order=log.memory.order,
            granted=signed is not None,
            vote=log.vote,
            available=self.kept.available(log.memory.incarnation),
            signed=signed or Signed(),
        )

    def _meet(self, who: str, incarnation: str) -> str:
        """The incarnation that ``who`` has here; if it comes with that one, it was heard of."""
        if who == self.name:
            return self.log.memory.incarnation
        known = self.log.meet(who, incarnation)
        if incarnation and known == incarnation:
            self.presence.hear(who)
        return known

    def grant(self, who: str, request: MembershipRequest) -> Signed | None:
        """The promise or the vote that is asked for; None where a higher ballot was promised."""
        self.log.hear_of(request.ballot, who)
        if request.kind == "promise":
            return Signed() if self.log.promise(request.ballot) else None
        if request.value is None:
            raise HoldfastError("a vote for nothing")
        return self.log.cast(request.ballot, request.value)

    # --- what it learns -----------------------------------------------------------------------------------

    def look_for_order(self) -> None:
        """The file ``membership/order.json``, which the member's operator has put there.

        One that says nothing yet may still be being copied; the others are heard of all the same.
        """
        path, number = self.folder / "membership" / "order.json", self.log.roster.number
        if not path.exists():
            return
        try:
            order: Order = parse(Order, path.read_bytes())
            remove(path)
            if order.federation == self.file.id and order.roster != number:
                raise HoldfastError(
                    f"an order for roster {order.roster}, but this is {number}: ask for a new one"
                )
            self.log.check_order(order)
            self.consider(order)
        except (HoldfastError, OSError) as error:
            self.events.complain("membership", reason=str(error), file=str(path))

    def consider(self, order: Order | None) -> None:
        """Takes over an order of the coordinator for this roster, if it is new."""
        if order is not None and self.log.consider(order):
            member = ", ".join([order.name, *order.also])
            self.events.log("an order of the coordinator", change=order.change, member=member, to=order.to)

    def hear(self, request: MembershipRequest, replies: list[tuple[str, MembershipReply]]) -> None:
        """What others have answered to ``request``, which asked whether there is anything new."""
        log, know_us = self.log, {self.name}
        for name, reply in replies:
            if reply.roster == request.roster:
                folder = "" if reply.available is None else reply.available.incarnation
                if log.memory.known.get(name, folder) == folder:  # else it has lost its own
                    self.presence.hear(name)
                if reply.known == request.incarnation:
                    know_us.add(name)
                elif reply.known and not log.memory.registered:
                    way = self._way_in("replace")
                    self.explain(f"{self.name} has lost its folder, since others know another: {way}")
            self.take_over(name, reply)
        now = log.roster.number
        if is_majority({name for name, reply in replies if reply.roster == now}, log.voters):
            self.confirmed = now
        if now == request.roster and is_majority(know_us, log.voters):
            log.remember(registered=True)
        if self.name not in log.roster.names and not self.serves:
            self.explain(f"{self.name} is not a member in roster {now}: {self._way_in('add')}")

    def take_over(self, name: str, reply: MembershipReply) -> None:
        """What ``name`` knows of orders and decisions; if it lies, the others are heard of all the same."""
        try:
            self.consider(reply.order)
            for decision in reply.decisions:
                self.learn(decision)
        except HoldfastError as error:
            self.events.complain("membership", peer=name, reason=str(error))

    def take_up(self, decision: Decision) -> None:
        """Learns what was decided this moment: there is nothing later that others could tell."""
        self.learn(decision)
        if decision.roster.number == self.log.roster.number:
            self.confirmed = decision.roster.number

    def learn(self, decision: Decision) -> None:
        """If it is about the next roster, the member continues in that one."""
        before, pending = self.log.roster, self.log.order
        if not self.log.follow([decision]):
            return
        after, self.kept = self.log.roster, self._models()
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
        self.problem = ""
        self.presence.begin_roster()
        self.changed()

    def _way_in(self, change: str) -> str:
        """How it may come to take part: by an order to ``change``, or by itself."""
        ordered = f"the coordinator has to run 'holdfast federation {change}' for it"
        if not self.log.rules.rejoin:
            return ordered
        return f"others take it in once they have left out the old one (membership.rejoin), or {ordered}"

    def explain(self, problem: str) -> None:
        """Why this member does not take part."""
        if self.problem != problem:
            self.problem = problem
            self.events.log("not taking part", "warning", reason=problem)
