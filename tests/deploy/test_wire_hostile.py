"""Peers that use HTTP and TLS in ways that no member needs take neither memory, time nor places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from holdfast_deploy.keys import make_key, public_key
from holdfast_deploy.ops.events import Events, silence
from holdfast_deploy.wire import line as line_module
from holdfast_deploy.wire.authority import make_certificates, make_request, sign_request
from holdfast_deploy.wire.credentials import Credentials, load_credentials, name_in, serial_of
from holdfast_deploy.wire.dial import Unreachable, Way
from holdfast_deploy.wire.line import MOST_ANSWERS, Body, Line
from holdfast_deploy.wire.listener import MOST_OF_ONE_MEMBER
from holdfast_deploy.wire.protocol import (
    MESSAGES,
    SYNC,
    Kind,
    Peer,
    Pieces,
    RefusedError,
    Sending,
    Wanted,
    pieces_of,
)
from holdfast_deploy.wire.revocations import Revoked, revoke
from holdfast_deploy.wire.server import Server

EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
SOON = 30.0  # seconds


class Echo:
    """Says what it is asked."""

    def __init__(self) -> None:
        self.answers = {SYNC: self.echo}

    async def echo(self, peer: Peer, body: bytes) -> bytes:
        return body

    def message(self, peer: Peer, wanted: Wanted) -> AbstractAsyncContextManager[Sending]:
        raise RefusedError(Kind.NOT_YET, "nothing to send")

    async def submit(self, peer: Peer, round: int, exchange: int, pieces: Pieces) -> bytes:
        raise RefusedError(Kind.NOT_ALLOWED, "no server")


async def echoing(credentials: Credentials | None) -> tuple[Server, int]:
    """A member that answers on a port."""
    echo = Echo()
    server = Server(lambda: echo, credentials, Events("a", silence))
    return server, await server.listener.open("127.0.0.1:0")


@contextmanager
def pretending(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> Iterator[Callable[[], Any]]:
    """A server that gives ``answer`` to the first bytes of each connection; made in the event loop."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(1 << 16)
            await answer(writer)
        writer.close()

    yield lambda: asyncio.start_server(serve, "127.0.0.1", 0)


def line_to(server: asyncio.Server) -> Line:
    return Line(Way("a", f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), None)


def test_answers_that_nobody_asked_for_end_the_connection() -> None:
    """While it waits to be used again; they would all be kept."""

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(EMPTY)
        await asyncio.sleep(0.2)
        for _ in range(1000):
            writer.write(EMPTY * 100)
            await writer.drain()
        await asyncio.sleep(SOON)

    async def scene() -> None:
        with pretending(flood) as serve:
            server = await serve()
            line = line_to(server)
            assert await line.ask(SYNC, b"") == b""
            (transport,) = line._open
            answers = transport.get_protocol()
            until = time.monotonic() + SOON / 3
            while not transport.is_closing():
                assert time.monotonic() < until
                await asyncio.sleep(0.05)
            assert len(answers) <= MOST_ANSWERS  # type: ignore[arg-type]
            await line.close()
            server.close()

    asyncio.run(scene())


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_who_takes_a_request_and_says_nothing_is_given_up(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "SILENCE", 0.5)
    body = Body(lambda: iter([b"numbers"]), 7) if method == "PUT" else None

    async def nothing(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SOON)

    async def scene() -> None:
        with pretending(nothing) as serve:
            server = await serve()
            line = line_to(server)
            with pytest.raises(Unreachable):
                async with asyncio.timeout(SOON / 2), line.request(method, f"{MESSAGES}/1/0", body):
                    pass
            await line.close()
            server.close()

    asyncio.run(scene())


def test_chunks_of_one_byte_are_read_together() -> None:
    """Reading each of them by itself took seconds in which nobody else was answered."""

    async def scene() -> list[int]:
        content = aiohttp.StreamReader(BaseProtocol(asyncio.get_running_loop()), limit=1 << 20)
        for _ in range(10_000):
            content.begin_http_chunk_receiving()
            content.feed_data(b"a")
            content.end_http_chunk_receiving()
        content.feed_eof()
        return [len(piece) async for piece in pieces_of(content)]

    assert asyncio.run(scene()) == [10_000]


def test_a_revoked_certificate_does_not_end_the_connections_of_the_new_one(tmp_path: Path) -> None:
    """Whoever stole b's key may still knock: a answers that the certificate was revoked, and no more."""
    coordinator = public_key(make_key(tmp_path))
    make_certificates(tmp_path, "test", ["a", "b"], days=1)
    stolen = load_credentials(tmp_path, "b", coordinator)
    for part in ("crt", "key"):
        (tmp_path / f"b.{part}").unlink()
    sign_request(tmp_path, make_request(tmp_path, "b"), ["b"], 1)
    revoke(tmp_path, Revoked(name="b", serial=serial_of(stolen.certificate), time="now"), coordinator)

    async def scene() -> None:
        server, port = await echoing(load_credentials(tmp_path, "a", coordinator))
        line = Line(Way("a", f"127.0.0.1:{port}"), load_credentials(tmp_path, "b", coordinator))
        assert await line.ask(SYNC, b"hello") == b"hello"
        (own,) = line._open
        context = stolen.client_context("a")
        knocks = [
            await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="a")
            for _ in range(MOST_OF_ONE_MEMBER + 8)
        ]
        until = time.monotonic() + SOON
        while len(server.listener.members) < MOST_OF_ONE_MEMBER + 1:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert len(server.listener.members) == MOST_OF_ONE_MEMBER + 1
        assert not own.is_closing()
        for _, writer in knocks:
            writer.close()
        await line.close()
        await server.close()

    asyncio.run(scene())


def test_an_authority_that_holds_no_longer_has_no_open_connections(tmp_path: Path) -> None:
    """Its key was stolen, for instance, and members change to another while they run."""
    for folder in ("before", "after"):
        make_certificates(tmp_path / folder, "test", ["a", "b"], days=1)
    own = load_credentials(tmp_path / "before", "a")

    async def scene() -> None:
        server, port = await echoing(own)
        line = Line(Way("a", f"127.0.0.1:{port}"), load_credentials(tmp_path / "before", "b"))
        assert await line.ask(SYNC, b"hello") == b"hello"
        server.listener.drop_revoked()
        (transport,) = line._open
        for part in ("ca.crt", "a.crt", "a.key"):
            (tmp_path / "before" / part).write_bytes((tmp_path / "after" / part).read_bytes())
        assert own.refresh(None)
        server.listener.drop_revoked()
        with pytest.raises(Unreachable):
            await line.ask(SYNC, b"hello")
        assert transport.is_closing()
        await line.close()
        await server.close()

    asyncio.run(scene())


@pytest.mark.parametrize("names", [b"\x30\x05\x82\x03\xff\xfe\xfd", b"\x30\x80"])
def test_a_certificate_whose_names_make_no_sense_is_nobodys(names: bytes) -> None:
    key, nobody, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(nobody, nobody, key.public_key(), 5, now, now + timedelta(days=1))
    odd = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, names)
    made = builder.add_extension(odd, critical=False).sign(key, hashes.SHA256())
    assert name_in(made.public_bytes(serialization.Encoding.PEM)) == ""
