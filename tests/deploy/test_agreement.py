"""Members agree on one next roster, whatever crashes, in any order of messages: all are tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation import MembershipConfig, NodeConfig
from holdfast_deploy.membership.agreement import (
    NO_BALLOT,
    Ballot,
    Decision,
    Proposal,
    Signed,
    Vote,
    is_majority,
)
from holdfast_deploy.membership.messages import check_vote, sign_vote
from holdfast_deploy.membership.roster import (
    AvailableModels,
    Order,
    Roster,
    check_change,
    led_roster,
    next_roster,
)
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials

FROM, WINDOW = 6, 0  # how far everybody is at first, and how many models before the newest are kept

HERE = "0" * 16


def roster_of(names: str, number: int = 0, first: int = 0, **fields: object) -> Roster:
    return Roster(number=number, first=first, nodes=[NodeConfig(name=name) for name in names], **fields)


class Ballots(NamedTuple):
    """A member's ``Vote``, as it can be looked up quickly."""

    promised: Ballot = NO_BALLOT
    ballot: Ballot = NO_BALLOT
    value: str = ""

    @classmethod
    def of(cls, vote: Vote | None) -> Ballots | None:
        return None if vote is None else cls(vote.promised, vote.ballot, text_of(vote.value))

    @property
    def vote(self) -> Vote:
        value = ROSTERS[self.value] if self.value else None
        return Vote(number=1, promised=self.promised, ballot=self.ballot, value=value)


ROSTERS: dict[str, Roster] = {}


def text_of(roster: Roster | None) -> str:
    if roster is None:
        return ""
    text = f"{roster.first} {roster.names} {roster.joined}"
    ROSTERS.setdefault(text, roster)
    return text


@lru_cache(None)
def promise(before: Ballots, ballot: Ballot) -> Ballots | None:
    return Ballots.of(before.vote.promise(ballot))


@lru_cache(None)
def cast(before: Ballots, ballot: Ballot, value: str) -> Ballots | None:
    return Ballots.of(before.vote.cast(ballot, ROSTERS[value]))


Promise = tuple[str, Ballots, int, int]  # by whom, what it has voted for, its oldest and newest model


@lru_cache(None)
def fixed(names: str, ballot: Ballot, promises: tuple[Promise, ...], lost: str) -> str:
    proposal = Proposal(roster_of(names), ballot, list(names))
    for name, voted, oldest, newest in promises:
        proposal.promised(name, voted.vote, AvailableModels(incarnation=HERE, oldest=oldest, newest=newest))
    return text_of(proposal.fix(lost, None))


class Attempt(NamedTuple):
    """A proposer's memory: who has promised what, what it proposes, who has voted."""

    ballot: Ballot
    promises: tuple[Promise, ...] = ()
    value: str = ""
    agreed: frozenset[str] = frozenset()


class World(NamedTuple):
    """Everything on disks and in memories. A message that is lost, or whose answer is, changes less of it."""

    votes: tuple[Ballots, ...]
    newest: tuple[int, ...]  # round of every member
    oldest: tuple[int, ...]  # whose models it keeps
    attempts: tuple[Attempt | None, ...]  # of every proposer; None: not begun, or forgotten in a crash
    begun: tuple[int, ...]  # how often
    decided: frozenset[str]


@dataclass
class Explorer:
    """All that can happen to ``names``; ``losses``: who proposes to go on without whom."""

    names: str
    losses: dict[str, str]
    tries: int = 1  # of each proposer, which crashes in between
    rounds: int = 0  # that every member may finish meanwhile
    keeps: bool = True  # whether a member that has promised keeps its models

    def explore(self) -> tuple[int, set[str]]:
        """The number of worlds, and all decisions that are ever made."""
        members, proposers = len(self.names), len(self.losses)
        ages = ((FROM,) * members, (FROM - WINDOW,) * members)
        start = World((Ballots(),) * members, *ages, (None,) * proposers, (0,) * proposers, frozenset())
        todo, seen, decisions = [start], {start}, set()
        while todo:
            for after in self.after(todo.pop()):
                if after not in seen:
                    assert len(after.decided) <= 1, after  # nobody goes on in another roster
                    for text in after.decided:
                        self.check(after, ROSTERS[text])
                        decisions.add(text)
                    seen.add(after)
                    todo.append(after)
        return len(seen), decisions

    def check(self, world: World, roster: Roster) -> None:
        """Everybody who is to go on has the model that it goes on from, now and later."""
        for name in set(roster.names) - set(roster.joined):
            i = self.names.index(name)
            assert world.oldest[i] <= roster.first <= world.newest[i]

    def after(self, world: World) -> Iterator[World]:
        for p, name in enumerate(self.losses):
            attempt, begun = world.attempts[p], world.begun[p]
            if attempt is not None:
                yield from self.proceed(world, p, attempt)
            if begun < self.tries:  # it begins; or crashes, and begins again
                anew = Attempt((begun + 1, name))
                yield world._replace(
                    begun=put(world.begun, p, begun + 1), attempts=put(world.attempts, p, anew)
                )
        for i in range(len(self.names)):
            if world.newest[i] < FROM + self.rounds:  # a round is finished
                newest, pending = world.newest[i] + 1, world.votes[i].promised != NO_BALLOT
                oldest = world.oldest[i] if pending and self.keeps else newest - WINDOW
                yield world._replace(newest=put(world.newest, i, newest), oldest=put(world.oldest, i, oldest))

    def proceed(self, world: World, p: int, attempt: Attempt) -> Iterator[World]:
        """What proposer ``p`` may do next; every answer arrives, or is lost after it was written down."""
        heard = {promised[0] for promised in attempt.promises}
        for i, name in enumerate(self.names):
            if attempt.value:
                vote = cast(world.votes[i], attempt.ballot, attempt.value)
                told = attempt._replace(agreed=attempt.agreed | {name})
            else:
                vote = promise(world.votes[i], attempt.ballot)
                told = attempt
                if vote is not None and name not in heard:
                    promised = (name, vote, world.oldest[i], world.newest[i])
                    told = attempt._replace(promises=tuple(sorted([*attempt.promises, promised])))
            if vote is None:
                continue
            kept = world._replace(votes=put(world.votes, i, vote))
            yield kept
            decided = world.decided | ({told.value} if is_majority(told.agreed, self.names) else set())
            yield kept._replace(attempts=put(world.attempts, p, told), decided=decided)
        if not attempt.value:
            value = fixed(self.names, attempt.ballot, attempt.promises, self.losses[attempt.ballot[1]])
            if value:
                yield world._replace(attempts=put(world.attempts, p, attempt._replace(value=value)))


def put(items: tuple, i: int, item: object) -> tuple:
    return (*items[:i], item, *items[i + 1 :])


def test_all_orders_of_crashes_and_messages_lead_to_one_decision_at_most() -> None:
    worlds, decisions = Explorer("abc", {"a": "c", "b": "a"}).explore()
    assert {tuple(ROSTERS[text].names) for text in decisions} == {("a", "b"), ("b", "c"), ("a", "b", "c")}
    assert worlds > 1000


@pytest.mark.slow
@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_proposers_that_crash_and_begin_again_decide_nothing_else(names: str) -> None:
    worlds, decisions = Explorer(names, {"a": "c", "b": "a"}, tries=2 if names == "abc" else 1).explore()
    print(f"{names}: {worlds} worlds, decisions {sorted(decisions)}")
    assert len(decisions) >= 3


def test_the_models_of_the_border_are_kept_while_rounds_go_on() -> None:
    worlds, decisions = Explorer("abc", {"a": "c"}, rounds=1).explore()
    assert worlds > 100
    assert len(decisions) > 3  # other borders, too
    with pytest.raises(AssertionError):  # without the promise to keep them, somebody is left without
        Explorer("abc", {"a": "c"}, rounds=1, keeps=False).explore()


def test_without_a_majority_nobody_goes_on() -> None:
    halves = Proposal(roster_of("abcd"), (1, "a"), list("abcd"))
    for name in "ab":
        halves.promised(name, Vote(number=1), AvailableModels(incarnation=HERE, oldest=0, newest=3))
    assert halves.fix("cd", None) is None
    assert not is_majority({"a", "b"}, "abcd")
    assert not is_majority({"a", "x", "y", "z"}, "abcd")  # strangers do not count


def test_votes_are_signed_by_the_members_themselves(tmp_path: Path) -> None:
    make_certificates(tmp_path, "test", ["a", "b"], days=1)
    make_certificates(tmp_path / "others", "test", ["a"], days=1)
    credentials, other = load_credentials(tmp_path, "a"), load_credentials(tmp_path / "others", "a")
    roster = roster_of("ab", 1, 4)
    decision = Decision(roster=roster, ballot=(1, "a"), votes={})
    vote = sign_vote(credentials, "digest", (1, "a"), roster)
    check_vote(credentials, "digest", "a", vote, decision)
    wrong = [
        ("b", vote, decision),  # a's vote is not b's
        ("a", sign_vote(other, "digest", (1, "a"), roster), decision),  # by another authority
        ("a", sign_vote(credentials, "digest", (2, "a"), roster), decision),  # in another ballot
        ("a", vote, decision.model_copy(update={"roster": roster_of("ab", 1, 5)})),  # for another border
        ("a", Signed(), decision),
    ]
    for name, signed, about in wrong:
        with pytest.raises(HoldfastError, match="is not signed by it"):
            check_vote(credentials, "digest", name, signed, about)


def test_a_roster_has_to_follow_by_the_rules() -> None:
    now, rules = roster_of("abcd"), MembershipConfig(remove_after=1.0, minimum=3)
    check_change(now, roster_of("abd", 1, 4), rules)
    added = Order(federation="f", roster=0, change="add", node=NodeConfig(name="e"))
    check_change(now, roster_of("abcde", 1, 4, joined=["e"], order=added), rules)
    for after, complaint in [
        (roster_of("ab", 1, 4), "fewer than membership.minimum"),
        (roster_of("abcde", 1, 4, joined=["e"]), "nobody has ordered 'e'"),
        (roster_of("abdef", 1, 4, order=added), "nobody has ordered 'f'"),
        (roster_of("abd", 2, 4), "does not follow 0"),
        (roster_of("abd", 1, 4, joined=list("abd")), "nobody who has a model"),
        (
            roster_of("abcde", 1, 4, joined=["e"], order=added.model_copy(update={"roster": 3})),
            "for roster 3",
        ),
    ]:
        with pytest.raises(HoldfastError, match=complaint):
            check_change(now, after, rules)
    with pytest.raises(HoldfastError, match="no order says so"):
        check_change(now, roster_of("abd", 1, 4), MembershipConfig(minimum=3))


def test_of_several_orders_the_last_one_counts_and_of_equals_all_take_one() -> None:
    first, second = (
        Order(federation="f", roster=0, change="remove", node=NodeConfig(name=name)) for name in "cb"
    )
    assert second.counts_before(first)
    assert not first.counts_before(second)
    later = first.model_copy(update={"number": 1})
    assert later.counts_before(second)
    assert not second.counts_before(later)
    assert not later.counts_before(later)
    with pytest.raises(ValueError, match="only 'remove'"):
        Order(federation="f", roster=0, change="add", node=NodeConfig(name="e"), also=["f"])


def test_where_nobody_stays_with_a_server_there_is_no_next_roster() -> None:
    assert led_roster(roster_of("abc"), 4, set("abc"), None) is None
    after = led_roster(roster_of("abc"), 4, set("bc"), None)
    assert after is not None
    assert after.names == ["a"]


def test_the_border_is_the_last_round_that_all_who_stay_have_finished() -> None:
    ends = {"a": (4, 6), "b": (3, 5), "c": (0, 2), "d": (6, 8), "e": (None, None)}
    available = {name: AvailableModels(incarnation=HERE, oldest=o, newest=n) for name, (o, n) in ends.items()}
    after = next_roster(roster_of("abcde"), available, {"c"}, None)
    assert after is not None
    assert (after.first, after.names) == (5, ["a", "b", "d", "e"])
    assert after.joined == ["d", "e"]  # the one has no model of round 5 any more, the other has none yet
    del available["b"]
    assert next_roster(roster_of("abcde"), available, {"c"}, None) is None  # b may be anywhere
