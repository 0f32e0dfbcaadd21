"""A stolen key: whoever serves or sends in a member's name is noticed, and nobody ends as if all was well."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_runs import PATIENCE, DeployedRun, Started, describe, free_ports, stopped
from http_peers import Made, Pretender

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.storage.links import ForgedError, LinkDigest, LinkDigests
from holdfast_deploy.storage.messages import Header, MessageFile, specs, write_message
from holdfast_deploy.wire.protocol import MESSAGES, SYNC, Answer, Ask

GECL = {"name": "local-gecl", "lr": 0.1, "local_steps": 2}


class Thief:
    """Answers every question for b's messages with b's own certificate, and random numbers."""

    def __init__(self, run: DeployedRun, port: int, folder: Path) -> None:
        self.run, self.folder, self.served = run, folder, 0
        self.message_of: dict[str, MessageFile] = {}  # by the path where it is fetched
        context = run.credentials("b").server_context()
        self.server = Pretender(f"127.0.0.1:{port}", context, self.answer)

    def answer(self, question: str, body: bytes, headers: Any) -> Made:
        if question in self.message_of:
            return 200, b"".join(self.message_of[question].chunks())
        ask = Ask.model_validate_json(body)
        incarnation = json.loads((self.run.folder / "b" / "identity.json").read_text())["incarnation"]
        # It has noted what it has sent to a, and says what a expects to hear.
        passed = [LinkDigest(round=p.round, sent=p.received, received=p.sent) for p in ask.passed]
        if question != SYNC:
            return 200, Answer(round=ask.round, passed=passed).model_dump_json().encode()
        message = self.message(ask, incarnation)
        self.message_of[f"GET {MESSAGES}/{ask.round}/{ask.exchange}"] = message
        self.served += 1
        return 200, Answer(round=ask.round, header=message.header, passed=passed).model_dump_json().encode()

    def message(self, ask: Ask, incarnation: str) -> MessageFile:
        last = ask.round == self.run.federation.last_message_round
        draw = torch.Generator().manual_seed(ask.round)
        names = [] if last else ["x", "v"]  # what Local G-ECL sends
        tree: Any = {name: torch.randn(1, 21, generator=draw) for name in names}
        header = Header(
            federation=ask.federation,
            sender="b",
            round=ask.round,
            exchange=ask.exchange,
            tensors=specs(tree),
            depends_on={"b": incarnation},
        )
        return write_message(self.folder / f"{ask.round}-{ask.exchange}", header, tree)


@pytest.mark.parametrize("rounds", [1, 12])
def test_a_thief_who_serves_for_a_member_shows_at_both_ends(rounds: int, tmp_path: Path) -> None:
    """Whoever a takes for b is the thief; b itself goes on with a and c as ever."""
    raw = describe(GECL, nodes=3, rounds=rounds)
    (tmp_path / "stolen").mkdir()
    misled = copy.deepcopy(raw)
    (port,) = free_ports(1)
    misled["node"][1]["address"] = f"127.0.0.1:{port}"
    honest = DeployedRun(make_federation(raw, "test"), tmp_path / "run")
    deceived = DeployedRun(make_federation(misled, "test"), tmp_path / "run", log=honest.log)
    thief = Thief(honest, port, tmp_path / "stolen")
    others, a = Started(honest, ["b", "c"]), Started(deceived, ["a"])
    try:
        others.threads["b"].join(PATIENCE)
        a.threads["a"].join(PATIENCE)
        assert thief.served > 0
        for error in (deceived.errors["a"], honest.errors["b"]):
            assert isinstance(error, ForgedError)
            assert "a received other messages from b than b sent" in str(error)
            assert "Give b a new key" in str(error)
    finally:
        thief.server.close()
        for member in (*honest.members.values(), *deceived.members.values()):
            member.stop()
        others.end()
        a.end()


def test_two_messages_of_one_client_for_a_round_are_a_theft(tmp_path: Path) -> None:
    raw = describe({"name": "fedavg", "lr": 0.1, "local_steps": 2}, rounds=4, network={"topology": "server"})
    run = DeployedRun(make_federation(raw, "test"), tmp_path / "run")
    started = Started(run, ["hub", "a", "b"])  # without c, nobody gets beyond the first round
    hub = run.members["hub"]
    started.until(lambda: "a" in hub.exchange.clients.arrivals.get((1, 0), ()))
    stolen = Header(
        federation=run.federation.id,
        sender="a",
        round=1,
        exchange=0,
        tensors=hub.exchange.clients.due.tensors,
    ).sealed("f" * 64)
    with pytest.raises(ForgedError, match="two messages of a for round 1 differ"):
        hub.exchange.clients.admit(stolen)
    started.stop()


def test_link_digests_compare_only_what_both_have_finished() -> None:
    at = {"a": 0, "b": 0}
    a, b = (LinkDigests(name, lambda name=name: at[name]) for name in "ab")
    for round in range(1, 8):
        a.add("b", round, sent=[f"{round}a"], received=[f"{round}b"])
        at["a"] = round
        b.add("a", round, sent=[f"{round}b" if round != 5 else "stolen"], received=[f"{round}a"])
        if round != 5:
            at["b"] = round - 1  # not finished yet: nothing is said about it
        if round < 6:
            a.compare("b", b.report("a"))
            b.compare("a", a.report("b"))
    with pytest.raises(ForgedError, match=r"up to round 5, a received other messages from b"):
        a.compare("b", b.report("a"))
    with pytest.raises(HoldfastError, match=r"up to round 5, a received other messages from b"):
        b.compare("a", a.report("b"))
    copied = LinkDigests("a", a.finished)
    copied.restore(a.state())
    assert copied.links == a.links


@pytest.mark.parametrize("forged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_averaging_server_and_its_clients_compare_all_that_passed(forged: bool, tmp_path: Path) -> None:
    """Also after the server was started again; whoever else sent in a's name is noticed by both."""
    raw = describe({"name": "fedlin", "lr": 0.1, "local_steps": 2}, rounds=6, network={"topology": "server"})
    run = stopped(raw, tmp_path, at=3)
    if forged:  # as if the server had got something else from a
        state = MessageFile(tmp_path / "hub" / "state")
        notes = json.loads(json.dumps(state.header.notes))
        assert notes["tally"]["a"][-1]["round"] == state.header.round > 0
        notes["tally"]["a"][-1]["received"] = "f" * 64
        write_message(state.path, state.header.model_copy(update={"notes": notes}), ())
    started = Started(run)
    if forged:
        for name in ("a", "hub"):
            started.threads[name].join(PATIENCE)
        for member in run.members.values():
            member.stop()
    started.end()
    if forged:
        assert all(isinstance(run.errors[name], ForgedError) for name in ("a", "hub"))
        assert run.errors["hub"].exit_code == 77
        return
    assert not run.errors
    for name in "abc":
        ours = run.members["hub"].exchange.link_digests.links[name][-1]
        theirs = run.members[name].exchange.link_digests.links["hub"][-1]
        assert ours.round == theirs.round == 6
        assert (ours.sent, ours.received) == (theirs.received, theirs.sent)


def test_an_averaging_server_that_comes_back_tells_of_whole_rounds_only(tmp_path: Path) -> None:
    """It has published both means of a round that no saved state tells of, and clients may ask at once."""
    fedlin = {"name": "fedlin", "lr": 0.1, "local_steps": 2}  # exchanges twice in a round
    run = stopped(describe(fedlin, rounds=12, network={"topology": "server"}), tmp_path, at=6)
    further = [member for member in run.members.values() if member.name != "hub" and member.done == 6]
    assert further
    assert run.members["hub"].done == 5
    hub, told = run.member("hub", network := NetworkThread()), []
    add = hub.exchange.link_digests.add

    def noticed(peer: str, round: int, **passed: Any) -> None:
        add(peer, round, **passed)
        told.extend((peer, each) for each in hub.exchange.link_digests.report(peer))

    hub.exchange.link_digests.add = noticed  # type: ignore[method-assign]
    run.members = {"hub": hub}
    hub.stop()
    run._run("hub")
    hub.close()
    network.close()
    assert {each.round for _, each in told} >= {6}
    for client in further:
        (theirs,) = [each for each in client.exchange.link_digests.links["hub"] if each.round == 6]
        for peer, ours in told:
            if (peer, ours.round) == (client.name, 6):
                assert (ours.sent, ours.received) == (theirs.received, theirs.sent)
