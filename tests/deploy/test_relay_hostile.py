"""A member, or the relay itself, that sends nonsense through the relay cuts nobody off from the others."""

from __future__ import annotations

import asyncio
import base64
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from federation_runs import DeployedRun, describe
from relay_runs import relayed

from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay import calls, switchboard
from holdfast_deploy.relay.parcels import Parcel
from holdfast_deploy.relay.relay import Relay
from holdfast_deploy.relay.sealing import Card
from holdfast_deploy.relay.switchboard import Switchboard
from holdfast_deploy.wire.authority import make_certificates
from holdfast_deploy.wire.credentials import load_credentials, serial_of
from holdfast_deploy.wire.revocations import Known, Revoked, revoke
from holdfast_deploy.wire.signatures import signature_of

GECL = {"name": "local-gecl", "lr": 0.1}
SOON = 30.0  # seconds


class Answers:
    """Says what it is asked; a long answer never comes."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any, Any], Awaitable[bytes]]] = {"Echo": self.echo}

    async def echo(self, frames: Any, context: Any) -> bytes:
        return b"".join([frame async for frame in frames])

    async def fetch(self, frames: Any, context: Any) -> AsyncGenerator[bytes, None]:
        await anext(aiter(frames))
        await asyncio.sleep(3600.0)
        yield b""


class Three:
    """a answers, b asks honestly, c does not; all through one relay, in this thread's event loop."""

    def __init__(self, folder: Path) -> None:
        self.coordinator = public_key(make_key(folder / "certs"))
        raw = relayed(describe(GECL, coordinator=self.coordinator), "abc")
        self.run = DeployedRun(make_federation(raw, "test"), folder)
        make_certificates(folder / "certs", "test", [*"abc", "relay"], days=1)
        self.log: list[dict[str, Any]] = []
        self.relay = Relay(self.run.federation, Events("relay", self.log.append))

    async def __aenter__(self) -> Three:
        relay = self.run.federation.relay
        assert relay is not None
        await self.relay.serve(relay.address, self.run.credentials("relay"))
        self.a, self.b, self.c = (self.board(name) for name in "abc")
        self.a.open(Answers())
        self.b.open()
        self.c.open()
        assert await self.ask(self.b) == b"hello"
        return self

    async def __aexit__(self, *_: object) -> None:
        for board in (self.b, self.c, self.a):
            if board.questions is not None:
                for task in board.questions.tasks:
                    task.cancel()
            await board.close()
        await self.relay.close()

    def board(self, name: str) -> Switchboard:
        events = Events(name, self.log.append)
        return Switchboard(self.run.federation, name, self.run.credentials(name), events)

    async def ask(self, board: Switchboard, peer: str = "a") -> bytes:
        call = board.channel_to(peer).unary_unary("/holdfast.Federation/Echo")
        return bytes(await call(b"hello", timeout=SOON))

    async def send(self, board: Switchboard, parcel: Parcel) -> None:
        """To a, as its card says where it is."""
        card = await board._card_of("a")
        await board.post(("a", card.instance), parcel)

    def signed(self, board: Switchboard, **changes: Any) -> bytes:
        """The card of ``board`` with ``changes``, signed by its own member."""
        card = board.identity.card.model_copy(update=changes)
        signature = base64.b64encode(signature_of(board.credentials, card.signed(board.scope))).decode()
        return card.model_copy(update={"signature": signature}).model_dump_json().encode()


def strange_certificate(three: Three) -> str:
    """Says that it is by the federation's authority, and is signed in a way that nobody knows."""
    authority = x509.load_pem_x509_certificate(three.c.credentials.authority)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    known, unknown = bytes.fromhex("2a8648ce3d040302"), bytes.fromhex("2a8648ce3d04037f")
    pem = base64.encodebytes(made.public_bytes(Encoding.DER).replace(known, unknown)).decode()
    return f"-----BEGIN CERTIFICATE-----\n{pem}-----END CERTIFICATE-----\n"


async def broken_base64(three: Three) -> None:
    card = three.c.identity.card.model_copy(update={"signature": "A"})
    await three.send(three.c, Parcel(1, 0, b"", card=card.model_dump_json().encode()))


async def broken_key(three: Three) -> None:
    await three.send(three.c, Parcel(1, 0, b"", card=three.signed(three.c, key="A")))


async def a_key_of_zeros(three: Three) -> None:
    """Whoever uses it has no secret with anybody: the library refuses to."""
    key = base64.b64encode(bytes(32)).decode()
    text = three.signed(three.c, key=key)
    board = three.board("c")
    board.identity = type(board.identity)(
        board.scope, board.identity.key, Card.model_validate_json(text), board.credentials
    )
    board.open()
    try:
        await asyncio.wait_for(board._connected.wait(), SOON)
        await three.send(board, Parcel(1, 0, b"", card=text))
        await asyncio.sleep(0.3)
    finally:
        await board.close()


async def a_strange_certificate(three: Three) -> None:
    card = three.c.identity.card.model_copy(update={"certificate": strange_certificate(three)})
    await three.send(three.c, Parcel(1, 0, b"", card=card.model_dump_json().encode()))


async def an_empty_question(three: Three) -> None:
    board = three.c
    session = board.identity.session(await board._card_of("a"), asks=True)
    sealed = session.seal_question(1, 0, True, b"")
    card = board.identity.card.model_dump_json().encode()
    await three.send(board, Parcel(1, 0, sealed, last=True, card=card))


async def a_head_that_is_no_text(three: Three) -> None:
    board = three.c
    session = board.identity.session(await board._card_of("a"), asks=True)
    sealed = session.seal_question(1, 0, True, b"\0\3\xff\xff\xff")
    card = board.identity.card.model_dump_json().encode()
    await three.send(board, Parcel(1, 0, sealed, last=True, card=card))


async def a_question_without_end(three: Three) -> None:
    """Frames behind a question of one frame, which nobody reads."""

    async def many() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"more"

    calls.Call(three.c, "a", calls.Head(kind="Fetch"), many())
    await asyncio.sleep(1.0)


ATTACKS = [
    broken_base64,
    broken_key,
    a_key_of_zeros,
    a_strange_certificate,
    an_empty_question,
    a_head_that_is_no_text,
    a_question_without_end,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_nonsense_is_refused_and_everybody_else_is_answered(
    attack: Callable[[Three], Awaitable[None]], tmp_path: Path
) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            await attack(three)
            await asyncio.sleep(0.3)
            assert three.a._listening is not None
            assert not three.a._listening.done(), three.a._listening
            assert await asyncio.wait_for(three.ask(three.b), 15) == b"hello"
            assert any(entry["event"] == "a parcel was refused" for entry in three.log)

    asyncio.run(scene())


def test_processes_that_come_and_go_cut_nobody_off(tmp_path: Path) -> None:
    """Such as those of people who look at the status, or of a member that wants to be many."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            for _ in range(40):  # more than a connection carries by default, or a member may have at a time
                board = three.board("c")
                board.open()
                assert await three.ask(board) == b"hello"
                await board.close()
                assert await three.ask(three.c) == b"hello"
            assert await three.ask(three.b) == b"hello"
            assert len(three.a.senders) < 30
            assert not any(entry["event"] == "a parcel was refused" for entry in three.log)

    asyncio.run(scene())


def test_processes_that_come_and_go_do_not_push_out_one_that_computes_for_long(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            assert await three.ask(three.c) == b"hello"
            for _ in range(40):
                board = three.board("c")
                board.open()
                assert await three.ask(board) == b"hello"
                await board.close()
            assert await three.ask(three.c) == b"hello"
            assert three.a.questions is not None
            three.a.questions.oldest["c"] = int(time.time()) + 1  # as after more than a thousand of them
            three.a.questions.renew()  # as with every new key
            assert await three.ask(three.c) == b"hello"
            assert not any(entry["event"] == "a parcel was refused" for entry in three.log)

    asyncio.run(scene())


def test_a_question_is_not_lost_because_an_idle_stream_to_its_receiver_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switchboard, "MOST_IDLE", 1)

    async def scene() -> None:
        async with Three(tmp_path) as three:
            [first] = three.b.senders
            nothing = Parcel(1, 0, b"", cancels=True)
            await three.b.post(("c", three.c.identity.card.instance), nothing)
            third = three.b.post(("b", three.b.identity.card.instance), nothing)  # the stream to a ends
            _, answer = await asyncio.gather(third, three.ask(three.b))
            assert answer == b"hello"
            assert first in three.b.senders

    asyncio.run(scene())


def test_a_revoked_member_is_not_asked_through_the_relay_any_more(tmp_path: Path) -> None:
    """Neither by those who have talked to it before."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            serial = serial_of(three.a.credentials.certificate)
            entry = Revoked(name="a", serial=serial, time="today", reason="stolen")
            three.b.credentials.revocations = Known(revoked={entry.serial: entry})
            with pytest.raises(grpc.aio.AioRpcError, match="was revoked on today: stolen"):
                await three.ask(three.b)

    asyncio.run(scene())


def test_the_relay_hangs_up_on_a_member_whose_certificate_was_revoked(tmp_path: Path) -> None:
    async def scene() -> None:
        async with Three(tmp_path) as three:
            certs, serial = tmp_path / "certs", serial_of(three.c.credentials.certificate)
            assert three.c._connected.is_set()
            revoke(certs, Revoked(name="c", serial=serial, time="today"), three.coordinator)
            until = time.monotonic() + SOON
            while three.c._connected.is_set():
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            assert await three.ask(three.b) == b"hello"

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
            assert three.relay.credentials is not None
            three.relay.credentials.refresh(three.coordinator)
            forged = load_credentials(own, "b")
            forged.authority = three.b.credentials.authority
            thief = Switchboard(three.run.federation, "b", forged, Events("thief", three.log.append))
            thief.open()
            try:
                with pytest.raises((grpc.aio.AioRpcError, TimeoutError)):
                    await asyncio.wait_for(three.ask(thief), 3)
            finally:
                await thief.close()
            reason = "the certificate of b is by an authority that does not vouch for it"
            assert any(entry.get("reason") == reason for entry in three.log)

    asyncio.run(scene())


def test_the_relay_remembers_only_processes_that_are_there(tmp_path: Path) -> None:
    """A sender says itself which of its processes a parcel is from."""

    async def scene() -> None:
        async with Three(tmp_path) as three:
            card = await three.c._card_of("a")
            for i in range(20):
                sender = calls.Sender(three.c.channel, ("a", card.instance), f"{i:032x}")
                await sender.send(Parcel(1, 0, b"", cancels=True))
                await sender.finish()
            [box] = three.relay.boxes["a"].values()
            assert len(box.senders) <= 2

    asyncio.run(scene())
