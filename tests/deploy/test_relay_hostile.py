"""A lying relay can delay members but not deceive them, and a member that lies to it cuts nobody off."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest
from federation_runs import DeployedRun, describe
from relay_runs import relayed

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay import relay as relay_module
from holdfast_deploy.relay.relay import CALLS, End, Relay
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import Credentials, load_credentials, serial_of
from holdfast_deploy.wire.dial import Preface, Unreachable, reach_relay, way_to
from holdfast_deploy.wire.line import Line
from holdfast_deploy.wire.listener import MOST_OF_ONE_MEMBER
from holdfast_deploy.wire.protocol import SYNC, Kind, Peer, Pieces, RefusedError, Sending, Wanted
from holdfast_deploy.wire.relayed import MOST_BEGINNING
from holdfast_deploy.wire.revocations import Known, Revoked, revoke
from holdfast_deploy.wire.server import Server

GECL = {"name": "local-gecl", "lr": 0.1}
SOON = 30.0  # seconds


class Echo:
    """Says what it is asked, and who asks."""

    def __init__(self) -> None:
        self.answers = {SYNC: self.echo}
        self.asked: list[str] = []

    async def echo(self, peer: Peer, body: bytes) -> bytes:
        self.asked.append(peer.name)
        return body

    def message(self, peer: Peer, wanted: Wanted) -> AbstractAsyncContextManager[Sending]:
        raise RefusedError(Kind.NOT_YET, "nothing to send")

    async def submit(self, peer: Peer, round: int, exchange: int, pieces: Pieces) -> bytes:
        raise RefusedError(Kind.NOT_ALLOWED, "no server")


class Three:
    """a answers, b asks honestly, c may not be honest; all through one relay, in this thread's event loop."""

    def __init__(self, folder: Path, kind: type[Relay] = Relay) -> None:
        self.coordinator = public_key(make_key(folder / "certs"))
        raw = relayed(describe(GECL, coordinator=self.coordinator), "abc")
        self.run = DeployedRun(make_federation(raw, "test"), folder)
        make_certificates(folder / "certs", "test", [*"abc", "relay"], days=1)
        self.log: list[dict[str, Any]] = []
        self.relay = kind(self.run.federation, Events("relay", self.log.append))
        self.answering = Echo()
        self.credentials = {name: self.run.credentials(name) for name in "abc"}

    async def __aenter__(self) -> Three:
        relay = self.run.federation.relay
        assert relay is not None
        await self.relay.serve(relay.address, self.run.credentials("relay"))
        self.a = self.server("a", self.answering)
        self.b, self.c = self.line("b"), self.line("c")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.b.close()
        await self.c.close()
        await self.a.close()
        await self.relay.close()

    def server(self, name: str, answering: Echo) -> Server:
        relay = self.run.federation.relay
        assert relay is not None
        server = Server(lambda: answering, self.credentials[name], Events(name, self.log.append))
        server.open_at(relay.name, relay.address)
        return server

    def line(self, name: str, credentials: Credentials | None = None) -> Line:
        """The way from ``name`` to a."""
        return Line(way_to(self.run.federation, name, "a"), credentials or self.credentials[name])

    async def say(self, name: str, verb: str) -> tuple[asyncio.Transport, Preface]:
        """A connection of ``name`` to the relay that begins with ``verb``."""
        relay = self.run.federation.relay
        assert relay is not None
        return await reach_relay(relay.name, relay.address, self.credentials[name], verb)

    async def hello(self, line: Line) -> bool:
        return await line.ask(SYNC, b"hello", timeout=SOON) == b"hello"

    async def until(self, what: Callable[[], Any]) -> None:
        until = time.monotonic() + SOON
        while not what():
            assert time.monotonic() < until
            await asyncio.sleep(0.02)


# --- a member that lies to the relay ---------------------------------------------------------------------


NONSENSE = (
    "\n",
    "HELLO\n",
    "LISTEN to me\xff\n",
    "x" * 10_000,
    "GET / HTTP/1.1\r\n\r\n",
    "ACCEPT\n",
    "CALL\n",
)


async def nonsense(three: Three) -> None:
    for line in NONSENSE:
        await three.say("c", line)


async def a_token_of_another_member(three: Three) -> None:
    """c accepts the calls that are announced to a; it guesses right, but is not a."""

    async def steal() -> None:
        while True:
            for token in list(three.relay.announced):
                _, said = await three.say("c", f"ACCEPT {token}\n")
                assert await said.until(b"\n") == b"NO no such call"
            await asyncio.sleep(0.005)

    stealing = asyncio.create_task(steal())
    other = three.line("b")
    assert await three.hello(other)
    await other.close()
    stealing.cancel()


async def talking_before_it_is_joined(three: Three) -> None:
    for pause in (0.0, 0.2):
        transport, said = await three.say("c", "CALL nobody\n")
        await asyncio.sleep(pause)
        transport.write(b"more")
        assert await said.until(b"\n") == b"NO wait for OK"


async def calling_without_end(three: Three) -> None:
    for _ in range(CALLS):
        await three.say("c", "CALL nobody\n")
    await three.until(lambda: three.relay.calls["c"] == CALLS)
    _, said = await three.say("c", "CALL a\n")
    assert await said.until(b"\n") == b"NO too many calls at a time"


async def calling_and_hanging_up(three: Three) -> None:
    for _ in range(50):
        transport, _ = await three.say("c", "CALL a\n")
        await asyncio.sleep(0.002)
        transport.abort()


async def calling_and_saying_nothing(three: Three) -> None:
    """The member that is called waits for a handshake, of these calls only."""
    for _ in range(20):
        _, said = await three.say("c", "CALL a\n")
        assert await asyncio.wait_for(said.until(b"\n"), SOON) == b"OK"


async def calling_more_often_than_a_member_answers(three: Three) -> None:
    """All that could be answered at a time; others' calls would have to wait until these are given up."""
    ends = [(await three.say("c", "CALL a\n"))[1] for _ in range(MOST_BEGINNING + 8)]
    assert [await asyncio.wait_for(said.until(b"\n"), 5) for said in ends[MOST_OF_ONE_MEMBER:]] == [
        b"NO too many calls at a time"
    ] * (len(ends) - MOST_OF_ONE_MEMBER)


ATTACKS = [
    nonsense,
    a_token_of_another_member,
    talking_before_it_is_joined,
    calling_without_end,
    calling_and_hanging_up,
    calling_and_saying_nothing,
    calling_more_often_than_a_member_answers,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_member_that_lies_to_the_relay_cuts_nobody_off(
    attack: Callable[[Three], Awaitable[None]], tmp_path: Path
) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            assert await three.hello(three.b)
            await attack(three)
            fresh = three.line("b")
            assert await asyncio.wait_for(three.hello(fresh), 15)
            await fresh.close()
            assert set(three.answering.asked) <= {"b", "c"}

    asyncio.run(scene())


def test_the_newest_process_of_a_member_answers(tmp_path: Path) -> None:
    """The one before has ended, perhaps without a word."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            assert await three.hello(three.b)
            second = Echo()
            server = three.server("a", second)
            await three.until(lambda: len(three.relay.listening) == 1 and server.relayed is not None)
            await asyncio.sleep(0.5)
            other = three.line("b")
            assert await three.hello(other)
            await other.close()
            await server.close()

    asyncio.run(scene())


def test_processes_that_come_and_go_cut_nobody_off(tmp_path: Path) -> None:
    """Such as those of people who look at the status, or of a member that wants to be many."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            for _ in range(40):
                line = three.line("c")
                assert await three.hello(line)
                await line.close()
            assert await three.hello(three.b)
            assert await three.hello(three.c)
            await three.until(lambda: three.relay.calls["c"] <= 1)
            assert not three.relay.announced  # it remembers only what is there
            assert list(three.relay.listening) == ["a"]

    asyncio.run(scene())


def test_who_says_nothing_to_the_relay_has_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "HANDSHAKE", 0.5)

    async def scene() -> None:
        async with Three(tmp_path) as three:
            _, said = await three.say("c", "CALL a")  # and no end of the line
            assert await asyncio.wait_for(said.until(b"\n"), SOON) == b"NO nothing was said"

    asyncio.run(scene())


# --- a relay that lies ----------------------------------------------------------------------------------


class Misjoining(Relay):
    """Joins callers of a with c, who would like to answer in its place."""

    def begin(self, end: End, line: str) -> None:
        super().begin(end, line.replace("CALL a", "CALL c"))


class Answering(End):
    """Says OK, and then answers itself."""

    def data_received(self, data: bytes) -> None:
        self.deadline.cancel()
        self.transport.write(b"OK\n" if data.startswith(b"CALL") else b"HTTP/1.1 200 OK\r\n\r\n{}")


class Silent(End):
    """Says OK, and nothing else."""

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"CALL"):
            self.transport.write(b"OK\n")


class Talkative(End):
    """Never comes to the end of a line."""

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"\x1b[2J" * 10_000)


class Reflecting(End):
    """Gives callers back what they say."""

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"OK\n" if data.startswith(b"CALL") else data)


def lying(end: type[End]) -> type[Relay]:
    return type(f"{end.__name__}Relay", (Relay,), {"end": lambda self: end(self)})


@pytest.mark.parametrize("kind", [Misjoining, *map(lying, (Answering, Silent, Talkative, Reflecting))])
def test_a_relay_that_lies_to_a_caller_gets_nothing_out_of_it(
    kind: type[Relay], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_deploy.wire.dial.HANDSHAKE", 1.0)
    monkeypatch.setattr("holdfast_deploy.wire.dial.CALLING", 1.0)

    async def scene() -> None:
        async with Three(tmp_path, kind) as three:
            thief = Echo()
            server = three.server("c", thief)
            await asyncio.sleep(0.3)
            with pytest.raises(Unreachable, match="it cannot be reached"):
                await asyncio.wait_for(three.hello(three.b), SOON)
            assert not thief.asked
            assert not three.answering.asked
            await server.close()

    asyncio.run(scene())


class Recording(End):
    """Keeps what callers say inside the pipe."""

    heard: list[bytes]

    def data_received(self, data: bytes) -> None:
        if self.other is not None and hasattr(self.relay, "heard"):
            self.relay.heard.append(data)
        super().data_received(data)


def test_a_relay_cannot_read_what_passes_nor_repeat_it(tmp_path: Path) -> None:
    secret = b"the patient's name " * 20

    async def scene() -> None:
        async with Three(tmp_path, lying(Recording)) as three:
            heard: list[bytes] = []
            three.relay.heard = heard  # type: ignore[attr-defined]
            assert await three.b.ask(SYNC, secret, timeout=SOON) == secret
            assert len(b"".join(heard)) > 2 * len(secret)
            assert secret[:19] not in b"".join(heard)
            assert three.answering.asked == ["b"]
            repeated = list(heard)
            transport, said = await three.say("c", "CALL a\n")
            assert await asyncio.wait_for(said.until(b"\n"), SOON) == b"OK"
            for piece in repeated:
                transport.write(piece)
            await three.until(lambda: said.ended)
            assert three.answering.asked == ["b"]
            assert await three.hello(three.b)

    asyncio.run(scene())


def test_a_relay_that_announces_calls_without_end_cuts_a_member_off_no_longer_than_that(
    tmp_path: Path,
) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            await three.until(lambda: "a" in three.relay.listening)
            for i in range(2000):
                three.relay.listening["a"].transport.write(f"{i:032x}\n".encode())
            assert three.a.relayed is not None
            assert len(three.a.relayed._accepting) <= 64
            reached = False
            while not reached:  # what it did not listen to is asked again
                with suppress(Unreachable):
                    reached = await three.hello(three.b)

    asyncio.run(scene())


# --- certificates ---------------------------------------------------------------------------------------


def test_a_revoked_member_is_not_asked_through_the_relay_any_more(tmp_path: Path) -> None:
    """Neither by those who have talked to it before."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            assert await three.hello(three.b)
            serial = serial_of(three.credentials["a"].certificate)
            entry = Revoked(name="a", serial=serial, time="today", reason="stolen")
            three.credentials["b"].revocations = Known(revoked={entry.serial: entry})
            assert "was revoked on today: stolen" in three.b.drop_if_revoked()
            with pytest.raises(Unreachable, match="was revoked on today: stolen"):
                await three.hello(three.b)
            assert three.answering.asked == ["b"]

    asyncio.run(scene())


def test_the_relay_hangs_up_on_a_member_whose_certificate_was_revoked(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            server, serial = three.server("c", Echo()), serial_of(three.credentials["c"].certificate)
            await three.until(lambda: "c" in three.relay.listening)
            revoke(tmp_path / "certs", Revoked(name="c", serial=serial, time="today"), three.coordinator)
            await three.until(lambda: "c" not in three.relay.listening)
            assert await three.hello(three.b)
            await server.close()

    asyncio.run(scene())


def test_an_authority_that_vouches_for_one_member_makes_no_others_for_the_relay(tmp_path: Path) -> None:
    """c's own authority signs a certificate for b; the relay would give it what is for b."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            certs, own = tmp_path / "certs", tmp_path / "own"
            make_certificates(own, "clinic", ["b", "c"], days=1)
            shutil.copy(own / "ca.crt", certs / "c.ca.crt")
            shutil.copy(own / "c.key", certs)
            shutil.copy(own / "c.crt", certs)
            three.relay.credentials.refresh(three.coordinator)
            forged = load_credentials(own, "b")
            forged.authority = three.credentials["b"].authority
            thief = three.line("b", forged)
            with pytest.raises(Unreachable, match="does not vouch for it"):
                await asyncio.wait_for(three.hello(thief), SOON)
            await thief.close()

    asyncio.run(scene())
