"""What is known about who takes part: all rosters so far, the coordinator's order, promises and votes.

A member has its log on disk, and every change is there before others hear of it. The coordinator's commands
keep one in memory: they follow what members show them, and vote for nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from holdfast.core.errors import HoldfastError
from holdfast.core.files import make_folder, sync_folder, write_atomic
from holdfast_deploy import keys
from holdfast_deploy.federation import Federation, NodeConfig
from holdfast_deploy.membership.agreement import MOST_AHEAD, Ballot, Decision, Signed, Vote, is_majority
from holdfast_deploy.membership.messages import check_vote, sign_vote
from holdfast_deploy.membership.roster import Checked, Order, Roster, check_change, first_roster
from holdfast_deploy.storage.links import new_incarnation
from holdfast_deploy.storage.messages import DamagedError, Incarnations, Number
from holdfast_deploy.wire.credentials import Credentials


class Memory(Checked):
    """What changes, in one file, so that it changes as a whole."""

    incarnation: str  # of this folder
    registered: bool = False  # whether a majority knows it: only then a member takes part
    known: Incarnations = Field(default={})  # of other members
    roster: Number = 0  # up to which ``known`` is right
    vote: Vote = Vote(number=1)
    order: Order | None = None  # the coordinator's latest


class MembershipLog:
    """The log of the federation ``file``; it begins with ``decisions``, or with what is in ``folder``.

    ``folder``: a member's ``membership``; it holds ``memory.json``, and ``roster-N.json`` for later rosters.
    """

    def __init__(
        self,
        file: Federation,
        credentials: Credentials | None,
        folder: Path | None = None,
        decisions: Iterable[Decision] = (),
    ) -> None:
        assert file.membership is not None
        self.file, self.rules, self.credentials, self.folder = file, file.membership, credentials, folder
        self.first, self.decisions = first_roster(file), list(decisions)
        self.memory = Memory(incarnation=new_incarnation())
        self.highest = 0  # count of any ballot heard of
        self._promising = threading.Lock()
        if folder is not None:
            self._open(folder)
        self.federation: Federation = file.in_roster(self.roster)  # with the members of the latest roster

    def _open(self, folder: Path) -> None:
        make_folder(folder)
        sync_folder(folder)  # a process that was killed may have left names that are not durable
        self.decisions = read_decisions(folder)
        if self.path.exists():
            self.memory = _read(self.path, Memory)
        else:
            self._write(self.path.name, self.memory)
        for decision in self.decisions[self.memory.roster :]:  # decided right before a crash
            self._know(decision.roster)

    # --- what is known ------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The file that changes as a whole."""
        assert self.folder is not None
        return self.folder / "memory.json"

    @property
    def roster(self) -> Roster:
        """The latest."""
        return self.decisions[-1].roster if self.decisions else self.first

    @property
    def behind(self) -> bool:
        """Whether a decision was lost that this member knew: until others have told it, it must not vote."""
        return self.roster.number < self.memory.roster

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

    @property
    def known_names(self) -> set[str]:
        """All who are, were, or are to become members."""
        rosters = [self.first, *(decision.roster for decision in self.decisions)]
        names = {name for roster in rosters for name in roster.names} | {m.name for m in self.file.members}
        return names | ({self.order.name} if self.order is not None else set())

    def removal_of(self, name: str) -> Roster | None:
        """The roster from which on the coordinator wants the others to continue without ``name``, if any."""
        found = None
        for roster in (decision.roster for decision in self.decisions):
            if name in roster.names:
                found = None
            elif roster.order is not None and name in roster.order.removed:
                found = roster
        return found

    @property
    def order(self) -> Order | None:
        """What is ordered for the roster under way."""
        order = self.memory.order
        return order if order is not None and order.roster == self.roster.number else None

    @property
    def vote(self) -> Vote:
        """What this member has promised and voted for about the next roster."""
        vote, number = self.memory.vote, self.roster.number + 1
        return vote if vote.number == number else Vote(number=number)

    @property
    def pending(self) -> bool:
        """Whether it has promised anything: all models have to be kept, as the next roster may need any."""
        return self.vote != Vote(number=self.roster.number + 1)

    @contextmanager
    def pinned(self, number: int) -> Iterator[bool]:
        """Whether all models of the roster of that number have to stay; nothing is promised meanwhile.

        Once the next one is decided, none goes that is still being written: it may be the border's.
        """
        with self._promising:
            yield self.pending or self.roster.number != number

    # --- what is believed ---------------------------------------------------------------------------------

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

    # --- what changes it ----------------------------------------------------------------------------------

    def consider(self, order: Order | None) -> bool:
        """Takes over an order of the coordinator for this roster; whether it is new."""
        if order is None or order.roster != self.roster.number or not order.counts_before(self.order):
            return False
        self.check_order(order)
        self.remember(order=order)
        return True

    def follow(self, decisions: Iterable[Decision]) -> bool:
        """Takes over those that come next, each checked; whether there are any."""
        before = self.roster.number
        for decision in decisions:
            if decision.roster.number == self.roster.number + 1:
                self.check_decision(decision)
                self._write(f"roster-{decision.roster.number}.json", decision)
                self.decisions.append(decision)
                self._know(decision.roster)
                self.federation = self.file.in_roster(decision.roster)
        return self.roster.number > before

    def meet(self, name: str, incarnation: str) -> str:
        """The incarnation of ``name`` that is known; if none is, ``incarnation``, unless that is ""."""
        known = self.memory.known.get(name, "")
        if incarnation and not known:
            self.remember(known={**self.memory.known, name: incarnation})
            return incarnation
        return known

    def new_ballot(self, name: str) -> Ballot:
        """One that ``name`` may draw: above all that were heard of."""
        return max(self.highest, self.vote.promised[0]) + 1, name

    def hear_of(self, ballot: Ballot, name: str) -> None:
        """Refuses a ballot that ``name`` cannot have drawn."""
        before = max(self.highest, self.vote.promised[0])
        if ballot[1] != name or ballot[0] > before + MOST_AHEAD:
            raise HoldfastError(f"a ballot that {name} cannot have drawn: {ballot}, after {before}")
        self.highest = max(before, ballot[0])

    def promise(self, ballot: Ballot) -> bool:
        """The promise to take no ballot below ``ballot``; False where a higher one was promised."""
        return self._promise(self.vote.promise(ballot))

    def cast(self, ballot: Ballot, value: Roster) -> Signed | None:
        """The vote for ``value``, which has to be able to follow; None where a higher ballot was promised."""
        self.check(value)
        if not self._promise(self.vote.cast(ballot, value)):
            return None
        return sign_vote(self.credentials, self.file.id, ballot, value)

    def _promise(self, vote: Vote | None) -> bool:
        if vote is None:
            return False
        with self._promising:  # from here on, no model is removed
            self.remember(vote=vote)
        return True

    def remember(self, **changes: Any) -> None:
        """Writes down ``changes`` of ``Memory``, for good."""
        changed = self.memory.model_copy(update=changes)
        if changed != self.memory:
            self._write("memory.json", changed)
            self.memory = changed

    def _know(self, roster: Roster) -> None:
        """A member that begins ``roster`` with a new folder may come with another incarnation."""
        if roster.number <= self.memory.roster:  # its file was lost, what followed from it was not
            return
        fresh = set(roster.joined) - set(roster.incarnations)
        known = {name: inc for name, inc in self.memory.known.items() if name not in fresh}
        self.remember(roster=roster.number, known={**known, **roster.incarnations})

    def _write(self, name: str, content: Checked) -> None:
        if self.folder is not None:
            write_atomic(self.folder / name, content.model_dump_json().encode() + b"\n")


# --- on disk ----------------------------------------------------------------------------------------------


def read_decisions(folder: Path) -> list[Decision]:
    """About all rosters after the first, up to one whose file is damaged: others have it, see ``behind``."""
    _refuse_epochs(folder / "memory.json")
    decisions: list[Decision] = []
    while (path := folder / f"roster-{len(decisions) + 1}.json").exists():
        try:
            decisions.append(_read(path, Decision))
        except DamagedError:
            break
    return decisions


def _refuse_epochs(path: Path) -> None:
    """Before version 0.2, rosters were called epochs, also in these files."""
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError:  # damaged
        return
    if isinstance(found, dict) and "epoch" in found:
        raise HoldfastError(
            f"{path} was written by an earlier version of holdfast: finish the run with that version, or "
            "start all members in empty folders"
        )


def _read(path: Path, model: Any) -> Any:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedError(
            f"{path} is damaged: take the whole folder of this member away, and have the coordinator run "
            "'holdfast federation replace'"
        ) from None
