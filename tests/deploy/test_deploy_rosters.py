"""Members come and go while a federation runs, with the models of the simulator with the same rosters."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import roster_runs
import tomli_w
import torch
from command_line import holdfast
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from federation_runs import PATIENCE, describe, free_ports
from roster_runs import Threads

from holdfast.core.errors import REFUSED, TRY_LATER, HoldfastError
from holdfast_deploy import keys
from holdfast_deploy.federation import LimitsConfig, NodeConfig
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.membership import service
from holdfast_deploy.membership.agreement import Decision, Signed
from holdfast_deploy.membership.kept_models import KeptModels, all_pinned
from holdfast_deploy.membership.messages import MembershipRequest
from holdfast_deploy.membership.roster import Order, RosterChanged
from holdfast_deploy.membership.start import keep_model
from holdfast_deploy.membership.view import MembershipView
from holdfast_deploy.ops.events import Events

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}
KEY = Ed25519PrivateKey.generate()


def changing(algorithm: dict[str, Any], nodes: int, rounds: int, **changes: Any) -> dict[str, Any]:
    membership = {"remove_after": "6s", "minimum": 2}
    return describe(algorithm, nodes, rounds, membership=membership, dtype="float64", **changes)


def order(
    threads: Threads, change: str, name: str, roster: int = 0, address: str = "", key: Any = None
) -> Order:
    node = NodeConfig(name=name, address=address)
    wanted = Order(federation=threads.file.id, roster=roster, change=change, node=node)
    signature = keys.sign("membership", wanted.document, key or KEY)
    return wanted.model_copy(update={"signature": signature})


def drop_in(threads: Threads, name: str, wanted: Order) -> None:
    """What its people do with a file that the coordinator has sent."""
    (threads.folder / name / "membership" / "order.json").write_text(wanted.model_dump_json())


def test_members_go_on_without_one_that_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 3, 8, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abc":
        threads.start(name)
    threads.hold(3)
    drop_in(threads, "a", order(threads, "remove", "c", key=Ed25519PrivateKey.generate()))  # a forged one
    threads.until(
        lambda: any("another key than the coordinator's" in str(e.get("reason")) for e in threads.log)
    )
    drop_in(threads, "b", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.limit = 9
    threads.threads.pop("c").join(PATIENCE)
    assert str(threads.errors.pop("c")).startswith("the coordinator has removed c after round")
    threads.end()
    (roster,) = threads.check("ab")
    assert (roster.names, roster.joined) == (["a", "b"], [])
    assert 2 <= roster.first <= 3


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"warm_start_rounds": 2}])  # with messages before the first round
def test_members_go_on_by_themselves_without_one_that_is_lost(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    threads = Threads(make_federation(changing(GECL | changes, 4, 30), "test"), tmp_path)
    for name in "abcd":
        threads.start(name)
    threads.hold(5)
    threads.stop("c")
    threads.limit = 31
    threads.end()
    last = threads.check("abd")[-1]
    assert last.names == ["a", "b", "d"]
    assert 4 <= last.first < 30


@pytest.mark.slow
def test_the_coordinator_removes_adds_and_replaces_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 4, 40, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path, extra="e")
    for name in "abcd":
        threads.start(name)
    threads.hold(5)
    drop_in(threads, "a", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.hold(15)
    threads.threads.pop("c").join(PATIENCE)
    assert str(threads.errors.pop("c")).startswith("the coordinator has removed c after round 5")
    new = order(threads, "add", "e", roster=1, address=f"127.0.0.1:{free_ports(1)[0]}")
    drop_in(threads, "b", new)
    threads.start("e")
    threads.agreed(2)
    threads.hold(25)
    threads.stop("b")
    threads.limit = 41
    shutil.rmtree(tmp_path / "b")
    threads.start("b")
    threads.until(lambda: any("lost its folder" in str(entry.get("reason")) for entry in threads.log))
    drop_in(threads, "a", order(threads, "replace", "b", roster=2, address=threads.file.member("b").address))
    threads.end()
    removed, added, replaced = threads.check("abde")
    assert (removed.names, removed.joined) == (["a", "b", "d"], [])
    assert (added.names, added.joined) == (["a", "b", "d", "e"], ["e"])
    assert (replaced.names, replaced.joined) == (["a", "b", "d", "e"], ["b"])
    assert removed.first < added.first <= replaced.first


@pytest.mark.slow
def test_whom_the_coordinator_has_removed_it_can_add_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the folder that it had: what stands there about its removal is not the latest."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 4, 20, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abcd":
        threads.start(name)
    threads.hold(3)
    drop_in(threads, "a", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.hold(8)
    threads.threads.pop("c").join(PATIENCE)
    removed = threads.errors.pop("c")
    assert isinstance(removed, HoldfastError)
    assert removed.exit_code == REFUSED
    drop_in(threads, "b", order(threads, "add", "c", roster=1, address=threads.file.member("c").address))
    threads.agreed(2)
    threads.limit = 21
    threads.start("c")
    threads.end()
    assert [roster.joined for roster in threads.check("abcd")] == [[], ["c"]]


@pytest.mark.slow
@pytest.mark.parametrize("later", ["", "d", "de"])
def test_who_was_away_while_it_was_removed_and_added_again_goes_on(
    later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of the changes one after another, and after the first answer it is still out."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 5, 20, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abcde":
        threads.start(name)
    threads.hold(3)
    threads.stop("c")
    del threads.threads["c"]
    for roster, name in enumerate(["c", *later]):
        drop_in(threads, "a", order(threads, "remove", name, roster=roster))
        threads.agreed(roster + 1)
        if name != "c":
            threads.threads.pop(name).join(PATIENCE)
            assert "has removed" in str(threads.errors.pop(name))
    roster = len(later) + 1
    drop_in(threads, "b", order(threads, "add", "c", roster=roster, address=threads.file.member("c").address))
    threads.agreed(roster + 1)
    threads.limit = 21
    stopped = threads.members["c"]
    threads.start("c")
    threads.until(lambda: threads.members["c"] is not stopped or not threads.threads["c"].is_alive())
    assert "c" not in threads.errors, threads.errors["c"]  # the others would wait for it
    threads.end()
    threads.check("".join(sorted({*"abcde"} - {*later})))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "cohort"), [("scaffold", 2), ("fedavg", "all")])
def test_a_server_goes_on_without_a_client_that_is_lost(algorithm: str, cohort: Any, tmp_path: Path) -> None:
    network = {"topology": "server", "cohort": cohort}
    raw = changing({"name": algorithm, "lr": 0.1, "local_steps": 2}, 4, 20, network=network)
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in ["hub", *"abcd"]:
        threads.start(name)
    threads.hold(5)
    threads.stop("c")
    threads.limit = 21
    threads.end()
    last = threads.check("abd")[-1]
    assert last.names == ["a", "b", "d"]
    assert 3 <= last.first < 20


def signed(threads: Threads, wanted: Order) -> Order:
    return wanted.model_copy(update={"signature": keys.sign("membership", wanted.document, KEY)})


@pytest.mark.slow
def test_two_that_are_lost_at_once_are_removed_by_one_order_whatever_was_ordered_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order about one of them waits for the other; a later one takes its place."""
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 5, 12, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abcde":
        threads.start(name)
    threads.hold(3)
    for name in "bd":
        threads.stop(name)
        del threads.threads[name]
    drop_in(threads, "a", order(threads, "remove", "b"))
    threads.until(lambda: any(entry.get("member") == "b" for entry in threads.log))
    both = order(threads, "remove", "d").model_copy(update={"also": ["b"], "number": 1})
    drop_in(threads, "c", signed(threads, both))
    threads.agreed(1)
    threads.limit = 13
    threads.end()
    (roster,) = threads.check("ace")
    assert roster.names == ["a", "c", "e"]


@pytest.mark.slow
def test_who_was_removed_is_told_so_also_after_other_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 4, 12, coordinator=KEY.public_key().public_bytes_raw().hex(), limits={"wait": 20.0})
    raw["membership"] = {"rejoin": True}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in "abcd":
        threads.start(name)
    threads.hold(3)
    threads.stop("c")
    del threads.threads["c"]
    drop_in(threads, "a", order(threads, "remove", "c"))
    threads.agreed(1)
    drop_in(threads, "a", order(threads, "remove", "d", roster=1))
    threads.agreed(2)
    threads.threads.pop("d").join(PATIENCE)
    assert "has removed d" in str(threads.errors.pop("d"))
    threads.start("c")
    threads.threads.pop("c").join(PATIENCE)
    removed = threads.errors.pop("c")
    assert isinstance(removed, HoldfastError)
    assert removed.exit_code == REFUSED
    assert str(removed).startswith("the coordinator has removed c after round")
    threads.limit = 13
    threads.end()


@pytest.mark.slow
def test_a_server_that_has_lost_all_its_nodes_goes_on_with_those_that_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    fedavg = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
    raw = changing(fedavg, 3, 12, network={"topology": "server"})
    raw["membership"] = {"remove_after": "2s", "minimum": 2}  # not with the first that is back
    threads = Threads(make_federation(raw, "test"), tmp_path)
    for name in ("hub", *"abc"):
        threads.start(name)
    threads.hold(3)
    for name in "abc":
        threads.stop(name)
        del threads.threads[name]
    hub = threads.members["hub"]
    assert hub.rosters is not None
    threads.until(lambda: all(map(hub.rosters.lost, "abc")) and hub.rosters.due_since is not None)
    threads.limit = 13
    for name in "ab":
        threads.start(name)
    threads.end()
    (roster,) = threads.check("ab")
    assert roster.names == ["a", "b"]


def test_a_file_that_is_no_order_keeps_nobody_from_hearing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 3, 6, coordinator=KEY.public_key().public_bytes_raw().hex())
    raw["membership"] = {}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    late = order(threads, "remove", "c", roster=7)
    for name, text in {"a": '{"half": ', "b": late.model_dump_json()}.items():
        place = tmp_path / name / "membership"
        place.mkdir(parents=True)
        (place / "order.json").write_text(text)
    for name in "abc":
        threads.start(name)
    threads.end()
    threads.check("abc")
    told = {entry["node"]: entry["reason"] for entry in threads.log if entry["event"] == "membership"}
    assert "not a valid order" in told["a"]
    assert "an order for roster 7, but this is 0" in told["b"]


def test_a_roster_that_a_member_hears_of_while_it_reads_its_data_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.1)
    fedavg = {"name": "fedavg", "lr": 0.1, "local_steps": 2}
    raw = changing(fedavg, 3, 6, network={"topology": "server"}, limits={"wait": 9.0})
    raw |= {"coordinator": KEY.public_key().public_bytes_raw().hex(), "membership": {}}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    read = roster_runs.open_site

    def slowly(now: Any, name: str, *data: Any) -> Any:
        if name == "b" and now.roster_number == 0 and threads.limit == 7:
            threads.until(lambda: any((e["event"], e["node"]) == ("a new roster", "b") for e in threads.log))
        return read(now, name, *data)

    monkeypatch.setattr(roster_runs, "open_site", slowly)
    for name in ("hub", *"abc"):
        threads.start(name)
    threads.limit = 2
    threads.until(lambda: threads.members.keys() == {"hub", *"abc"} and threads.members["b"].done > 0)
    for name in "bc":
        threads.stop(name)
        del threads.threads[name]
    drop_in(threads, "hub", order(threads, "remove", "c"))
    threads.agreed(1)
    threads.limit = 7
    threads.start("b")
    threads.end()
    assert threads.check("ab")[0].names == ["a", "b"]


def test_what_a_roster_still_computes_is_no_model_of_the_next(tmp_path: Path) -> None:
    kept = KeptModels(tmp_path / "roster-1", 0, all_pinned, LimitsConfig())
    view: Any = SimpleNamespace(kept=kept, folder=tmp_path)
    before: Any = SimpleNamespace(roster_number=0)
    exchange: Any = SimpleNamespace()
    with pytest.raises(RosterChanged):
        keep_model(view, before, exchange, 7, torch.zeros(2))
    assert kept.rounds == []


@pytest.mark.slow
def test_the_coordinators_commands_say_what_becomes_of_an_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    key = keys.public_key(keys.make_key(tmp_path / "certs"))
    raw = changing(GECL, 4, 9, coordinator=key) | {"membership": {"minimum": 2}}
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(raw))
    threads = Threads(make_federation(raw, "test"), tmp_path)
    nobody = holdfast("federation", "remove", path, "c")
    assert (nobody.code, "--dir" in nobody.err) == (TRY_LATER, True)
    nowhere = holdfast("federation", "remove", path, "c", "--dir", tmp_path / "nowhere")
    assert (nowhere.code, "--dir" in nowhere.err, (tmp_path / "nowhere").exists()) == (2, True, False)
    for name in "abcd":
        threads.start(name)
    threads.hold(2)
    few = holdfast("federation", "remove", path, "b", "c", "d")
    assert (few.code, "fewer than membership.minimum" in few.err) == (2, True)
    assert not list(tmp_path.glob("remove-*.json"))
    threads.stop("a")
    first = holdfast("federation", "remove", path, "c")  # waits for a
    assert (first.code, "takes the place" in first.out) == (0, False)
    second = holdfast("federation", "remove", path, "a")
    assert (second.code, "replaces an order" in second.out) == (0, True)
    del threads.threads["a"]
    threads.agreed(1)
    threads.until(lambda: [threads.members[name].federation.roster_number for name in "bcd"] == [1, 1, 1])
    status = json.loads(holdfast("federation", "status", path, "--json").out)
    assert {name: told.get("roster") for name, told in status.items()} == {"b": 1, "c": 1, "d": 1}
    threads.limit = 10
    threads.end()
    assert threads.check("bcd")[0].names == ["b", "c", "d"]
    alone = holdfast("federation", "remove", path, "c", "--dir", tmp_path / "b")
    assert (alone.code, "in roster 1 of 3 nodes" in alone.out) == (0, True)
    for name, words in {"a": "after 2 rounds", "b": "after 9 rounds"}.items():
        written = holdfast("federation", "model", path, "--name", name, "--dir", tmp_path / name)
        assert words in written.out, written
    assert holdfast("federation", "model", path, "--name", "zz").code == 2


def test_an_order_that_a_roster_began_without_is_called_void(tmp_path: Path) -> None:
    raw = changing(GECL, 3, 6, coordinator=KEY.public_key().public_bytes_raw().hex())
    threads, log = Threads(make_federation(raw, "test"), tmp_path), list[dict[str, Any]]()
    events, changes = Events("a", log.append), list[str]()
    changed = partial(changes.append, "a roster")
    view = MembershipView(threads.file, "a", tmp_path / "a", None, events, time.monotonic, changed)
    view.consider(order(threads, "remove", "c"))
    roster = view.log.roster.model_copy(update={"number": 1})
    view.learn(Decision(roster=roster, ballot=(1, "b"), votes={"a": Signed(), "b": Signed()}))
    (void,) = (entry for entry in log if entry["event"] == "an order is void")
    assert void["order"] == "remove c"
    assert "once more" in void["reason"]
    assert changes == ["a roster"]


def test_who_proposes_takes_over_an_order_that_others_have_heard_of_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONGEST_PAUSE", 0.2)
    raw = changing(GECL, 3, 8, coordinator=KEY.public_key().public_bytes_raw().hex()) | {"membership": {}}
    threads = Threads(make_federation(raw, "test"), tmp_path)
    wanted, promise = order(threads, "remove", "c"), MembershipView.grant

    def hears_just_before(view: MembershipView, who: str, request: MembershipRequest) -> Signed | None:
        if view.name == "b" and request.kind == "promise":
            view.consider(wanted)
        return promise(view, who, request)

    monkeypatch.setattr(MembershipView, "grant", hears_just_before)
    for name in "abc":
        threads.start(name)
    threads.hold(2)
    beginner = threads.members["a"].rosters
    assert beginner is not None
    broken = beginner.view.presence.broken
    threads.members["a"].network.loop.call_soon_threadsafe(broken.add, "a")  # a reason to begin
    threads.agreed(1)
    threads.threads.pop("c").join(PATIENCE)
    assert "has removed c" in str(threads.errors.pop("c"))
    threads.limit = 9
    threads.end()
    assert threads.check("ab")[0].names == ["a", "b"]
