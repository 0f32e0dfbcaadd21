"""A member that lies about who takes part changes nothing that its votes alone could not."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from command_line import holdfast
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federation_runs import PATIENCE, describe
from http_peers import Caller, Made, Pretender, problem
from roster_runs import Threads, rosters_of

from holdfast.core.errors import HoldfastError
from holdfast_deploy import keys
from holdfast_deploy.federation import MembershipConfig, NodeConfig
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.membership import service
from holdfast_deploy.membership.agreement import Decision
from holdfast_deploy.membership.messages import MembershipReply, MembershipRequest, check_vote, sign_vote
from holdfast_deploy.membership.roster import AvailableModels, Order, Roster, check_change, next_roster
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.protocol import MEMBERSHIP

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
KEY = Ed25519PrivateKey.generate()
NOW = Roster(number=0, first=0, nodes=[NodeConfig(name=name, samples=10) for name in "abcd"])


def after(names: str = "abcd", joined: str = "", order: Order | None = None, **nodes: NodeConfig) -> Roster:
    """A roster after ``NOW``, with some of its ``nodes`` changed."""
    members = [nodes.get(name, NodeConfig(name=name, samples=None if name == "e" else 10)) for name in names]
    return Roster(number=1, first=4, nodes=members, joined=list(joined), order=order)


def ordered(change: str, name: str, **node: Any) -> Order:
    return Order(federation="f", roster=0, change=change, node=NodeConfig(name=name, **node))


def test_nothing_changes_but_what_was_ordered_or_lost() -> None:
    rules, former = MembershipConfig(remove_after=1.0, rejoin=True), {"f": NodeConfig(name="f", samples=5)}
    moved = {"c": NodeConfig(name="c", address="there:1")}
    for fine in [
        after("abd"),
        after("abde", "e", ordered("add", "e")),
        after("abd", order=ordered("remove", "c")),
        after("ab", order=ordered("remove", "c").model_copy(update={"also": ["d"]})),
        after("abcd", "c", ordered("replace", "c", address="there:1"), **moved),
        after("abcdf", "f", f=former["f"]),
    ]:
        check_change(NOW, fine, rules, former)
    for wrong in [
        after(b=NodeConfig(name="b", samples=10**9)),  # by samples, it would outweigh all others
        after(b=NodeConfig(name="b", samples=10, local_steps=10**6)),
        after(b=NodeConfig(name="b", samples=10, address="elsewhere:1")),
        after("abcdf", "f", f=NodeConfig(name="f", samples=6)),
        after("abcde", "e", ordered("add", "e"), e=NodeConfig(name="e", samples=1)),
    ]:
        with pytest.raises(HoldfastError, match="is not as it was"):
            check_change(NOW, wrong, rules, former)
    for ignored in [
        after(order=ordered("remove", "c")),
        after("abd", order=ordered("remove", "c").model_copy(update={"also": ["d"]})),
        after(order=ordered("add", "e")),
        after("abde", "", ordered("add", "e")),
        after(order=ordered("replace", "c", samples=10)),
    ]:
        with pytest.raises(HoldfastError, match="does not do what its order says"):
            check_change(NOW, ignored, rules, former)


def test_votes_are_for_all_of_a_roster(tmp_path: Path) -> None:
    """Whoever passes a decision on cannot take its order out, or have others dial elsewhere."""
    make_certificates(tmp_path, "test", ["a"], days=1)
    credentials = load_credentials(tmp_path, "a")
    roster = after("abd", order=ordered("remove", "c"))
    vote = sign_vote(credentials, "digest", (1, "a"), roster)
    check_vote(credentials, "digest", "a", vote, Decision(roster=roster, ballot=(1, "a"), votes={}))
    moved = [node.model_copy(update={"address": "there:1"}) for node in roster.nodes]
    for changes in ({"order": None}, {"nodes": moved}):
        other = Decision(roster=roster.model_copy(update=changes), ballot=(1, "a"), votes={})
        with pytest.raises(HoldfastError, match="is not signed by it"):
            check_vote(credentials, "digest", "a", vote, other)


def say(threads: Threads, who: str, to: str, word: MembershipRequest) -> int:
    """What the member ``to`` thinks of it, if ``who`` says ``word``: a status."""
    context = threads.credentials(who).client_context(to)
    with Caller(threads.file.member(to).address, to, context, timeout=30) as caller:
        return caller.ask(MEMBERSHIP, word.model_dump_json().encode()).status


def test_a_liar_about_ballots_and_orders_does_not_keep_the_others_from_agreeing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a draws the highest ballot there is, and one in b's name; then it shows an order that nobody signed."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    coordinator = KEY.public_key().public_bytes_raw().hex()
    raw = describe(GECL, 4, 8, membership={}, dtype="float64", coordinator=coordinator)
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abcd":
        threads.start(name)
    threads.hold(3)
    liar, b = (threads.members[name].rosters for name in "ab")
    assert liar is not None
    assert b is not None
    monkeypatch.setattr(liar, "change_is_due", lambda: False)  # it lies about an order, and begins no roster
    about = {"federation": threads.file.id, "roster": 0, "incarnation": liar.view.log.memory.incarnation}
    for ballot in ((2**31 - 1, "a"), (1, "b")):
        for to in "bcd":
            word = MembershipRequest(**about, kind="promise", ballot=ballot)
            assert say(threads, "a", to, word) == 409
    forged = Order(federation=threads.file.id, roster=0, change="remove", node=NodeConfig(name="b"))
    liar.view.log.memory = liar.view.log.memory.model_copy(update={"order": forged})
    threads.until(lambda: any("nobody has signed" in str(e.get("reason")) for e in threads.log))
    b.view.log.memory = b.view.log.memory.model_copy(update={"registered": False})
    threads.until(lambda: b.view.log.memory.registered)  # it hears the others all the same

    wanted = Order(federation=threads.file.id, roster=0, change="remove", node=NodeConfig(name="d"))
    signature = keys.sign("membership", wanted.document, KEY)
    signed = wanted.model_copy(update={"signature": signature})
    (tmp_path / "c" / "membership" / "order.json").write_text(signed.model_dump_json())
    liar.view.log.memory = liar.view.log.memory.model_copy(update={"order": None})
    threads.threads.pop("d").join(PATIENCE)
    threads.limit = 9
    assert str(threads.errors.pop("d")).startswith("the coordinator has removed d")
    threads.end()
    assert all(e["peer"] == "a" for e in threads.log if "ballot" in str(e.get("reason")))


def test_no_roster_begins_after_the_last_round(tmp_path: Path) -> None:
    raw = describe(GECL, 3, 8, membership={"remove_after": "1s"})
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abc":
        threads.start(name)
    threads.hold(2)
    a = threads.members["a"].rosters
    assert a is not None
    late = Roster(number=1, first=9, nodes=a.view.log.roster.nodes, joined=["b", "c"])
    with pytest.raises(HoldfastError, match="does not follow"):
        a.view.log.check(late)
    threads.limit = 9
    threads.end()


def test_a_member_that_claims_all_rounds_there_could_be_takes_no_memory() -> None:
    liar = AvailableModels(incarnation="0" * 16, oldest=0, newest=2**31 - 1)
    honest = AvailableModels(incarnation="1" * 16, oldest=2, newest=4)
    tracemalloc.start()
    value = next_roster(NOW, {"a": liar, "b": honest, "d": honest}, ["c"], None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value is not None
    assert (value.first, value.names) == (4, ["a", "b", "d"])
    assert peak < 10**6


def _lie(about: str, threads: Threads) -> Callable[[bytes], bytes]:
    """What a answers about membership; each of these once kept the coordinator from removing it."""

    def rosters(text: bytes) -> bytes:
        """There is always a later roster, decided by nobody."""
        number = MembershipRequest.model_validate_json(text).roster + 1
        shown = Decision(roster=NOW.model_copy(update={"number": number}), ballot=(1, "a"), votes={})
        shown = shown if number < 50 else shown.model_copy(update={"roster": NOW})  # for a test that fails
        return MembershipReply(roster=number, decisions=[shown]).model_dump_json().encode()

    def orders(text: bytes) -> bytes:
        """There is an order with the highest number of all, signed by nobody."""
        forged = Order(federation=threads.file.id, roster=0, change="remove", node=NodeConfig(name="b"))
        forged = forged.model_copy(update={"number": 2**31 - 1})
        return MembershipReply(roster=0, order=forged).model_dump_json().encode()

    return {"rosters": rosters, "orders": orders}[about]


@pytest.mark.parametrize("about", ["rosters", "orders"])
def test_a_member_cannot_keep_the_coordinator_from_removing_it(about: str, tmp_path: Path) -> None:
    key = keys.make_key(tmp_path / "certs")
    raw = describe(GECL, 3, 8, membership={}, dtype="float64", coordinator=keys.public_key(key))
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    threads = Threads(make_federation(raw, "test"), tmp_path)
    lie, context = _lie(about, threads), threads.credentials("a").server_context()

    def answer(question: str, body: bytes, headers: Any) -> Made:
        return (200, lie(body)) if question == MEMBERSHIP else problem(404, "no such question")

    liar = Pretender(threads.file.member("a").address, context, answer)
    for name in "bc":
        threads.start(name)
    threads.until(lambda: all(name in threads.members for name in "bc"))
    outcome = holdfast("federation", "remove", path, "a", "--name", "b")
    assert outcome.code == 0, outcome
    assert "remove a, in roster 0 of 3 nodes" in outcome.out
    assert ("told b, c;" if about == "rosters" else "told a, b, c;") in outcome.out
    assert ("a is not believed: " in outcome.err) == (about == "rosters")
    threads.end()
    liar.close()
    assert threads.errors == {}
    assert [roster.names for roster in rosters_of(tmp_path / "b")] == [["b", "c"]]
