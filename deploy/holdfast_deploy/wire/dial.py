"""Connections to another member: directly, through an HTTP proxy, or through the relay."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from holdfast.core.errors import HoldfastError, printable
from holdfast_deploy.federation import Federation
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.listener import GOODBYE, OLD_WIRE, keep_alive, split_address
from holdfast_deploy.wire.protocol import HANDSHAKE, PATIENCE
from holdfast_deploy.wire.proxies import Proxy, connect_request, proxy_to

NO_ANSWER = "it cannot be reached"
LONGEST_REASON = 500  # characters of what a peer says about its refusal
LONGEST_PREFACE = 16384  # bytes of what the other end says before TLS
CALLING = PATIENCE + HANDSHAKE  # seconds in which the relay has to find a member

P = TypeVar("P", bound=asyncio.Protocol)


class Unreachable(Exception):  # noqa: N818 - not an error of anybody's
    """Nobody answers at a member's address, or somebody who is not that member."""


@dataclass(frozen=True)
class Way:
    """Where ``peer`` is reached: at an address (host:port), or through the relay of that name there."""

    peer: str
    address: str
    relay: str = ""


def way_to(federation: Federation, asker: str, peer: str) -> Way:
    """How ``asker`` reaches ``peer``."""
    if federation.relayed(asker, peer):
        assert federation.relay is not None
        return Way(peer, federation.relay.address, federation.relay.name)
    return Way(peer, next(member.address for member in federation.certified if member.name == peer))


async def dial(way: Way, factory: Callable[[], P], credentials: Credentials | None) -> tuple[P, bytes]:
    """A connection whose other end has shown that it is ``way.peer``, and its certificate in PEM."""
    try:
        if not way.relay:
            outer = await _reach(way.address)
        else:
            outer, said = await reach_relay(way.relay, way.address, credentials, f"CALL {way.peer}\n")
            async with asyncio.timeout(CALLING):
                answer = (await said.until(b"\n")).decode(errors="replace").strip()
            if answer != "OK":
                outer.abort()
                raise Unreachable(printable(answer.removeprefix("NO ").strip())[:LONGEST_REASON] or NO_ANSWER)
        return await secured(outer, way.peer, factory, credentials)
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"{NO_ANSWER} (certificate)") from None
    except socket.gaierror:
        raise Unreachable(f"{NO_ANSWER} (its host name is not known)") from None
    except (OSError, EOFError, TimeoutError):
        raise Unreachable(NO_ANSWER) from None


async def secured(
    outer: asyncio.Transport, peer: str, factory: Callable[[], P], credentials: Credentials | None
) -> tuple[P, bytes]:
    """TLS with ``peer`` over the connection ``outer``, unless there are no certificates."""
    loop, protocol = asyncio.get_running_loop(), factory()
    if credentials is None:
        outer.set_protocol(protocol)
        protocol.connection_made(outer)
        return protocol, b""
    try:
        inner = await loop.start_tls(
            outer,
            protocol,
            credentials.client_context(peer),
            server_hostname=peer,
            ssl_handshake_timeout=HANDSHAKE,
            ssl_shutdown_timeout=GOODBYE,
        )
    except BaseException:
        outer.abort()
        raise
    if inner is None:
        raise Unreachable(NO_ANSWER)
    shown = inner.get_extra_info("ssl_object")
    certificate = ssl.DER_cert_to_PEM_cert(shown.getpeercert(binary_form=True)).encode()
    try:
        credentials.check(peer, certificate)
        if shown.selected_alpn_protocol() == "h2":
            raise HoldfastError(OLD_WIRE)
    except HoldfastError as error:
        inner.abort()
        raise Unreachable(str(error)) from None
    protocol.connection_made(inner)
    return protocol, certificate


async def reach_relay(
    name: str, address: str, credentials: Credentials | None, verb: str
) -> tuple[asyncio.Transport, Preface]:
    """A connection to the relay ``name`` on which ``verb`` was said."""
    if credentials is None:
        raise HoldfastError("a relay needs certificates: leave out --insecure")
    said, _ = await secured(await _reach(address), name, Preface, credentials)
    outer = Pipe(said.transport)
    outer.write(verb.encode())
    return outer, said


async def _reach(address: str) -> asyncio.Transport:
    """A connection to host:port, through the environment's proxy if there is one."""
    host, port = split_address(address)
    proxy = proxy_to(host)
    async with asyncio.timeout(HANDSHAKE):
        if proxy is not None:
            return await open_tunnel(proxy, host, port)
        return (await _connect(host, port)).transport


async def _connect(host: str, port: int) -> Preface:
    transport, preface = await asyncio.get_running_loop().create_connection(Preface, host, port)
    keep_alive(transport.get_extra_info("socket"))
    return preface


async def open_tunnel(proxy: Proxy, host: str, port: int) -> asyncio.Transport:
    """A connection through ``proxy``; ``OSError`` or ``EOFError`` if it gives none."""
    said = await _connect(proxy.host, proxy.port)
    try:
        said.transport.write(connect_request(proxy, host, port))
        answer = await said.until(b"\r\n\r\n")
        if not answer.partition(b" ")[2].startswith(b"2"):
            raise ConnectionRefusedError("the HTTP proxy refuses")
    except BaseException:
        said.transport.abort()
        raise
    return said.transport


class Preface(asyncio.Protocol):
    """What the other end says before TLS begins with a member."""

    def __init__(self) -> None:
        self.text, self.ended = b"", False
        self._changed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.text += data
        if len(self.text) > LONGEST_PREFACE:
            self.transport.abort()
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = True
        self._changed.set()

    async def until(self, end: bytes) -> bytes:
        """All up to ``end``; ``EOFError`` if it does not come."""
        while end not in self.text:
            if self.ended:
                raise EOFError
            self._changed.clear()
            await self._changed.wait()
        found, _, self.text = self.text.partition(end)
        return found


class Pipe(asyncio.Transport):
    """A TLS connection to the relay, inside which TLS with a member begins.

    It does what ``outer`` does. Python before 3.11.8 and 3.12.2 needs it: there, a handshake that fails
    inside does not end a TLS connection around it, but raises a ``TypeError`` (python/cpython#113214).
    """

    _start_tls_compatible = True

    def __init__(self, outer: asyncio.Transport) -> None:
        super().__init__()
        self._outer = outer

    def _force_close(self, error: BaseException | None) -> None:
        self._outer.abort()

    def abort(self) -> None:
        self._outer.abort()

    def close(self) -> None:
        self._outer.close()

    def is_closing(self) -> bool:
        return self._outer.is_closing()

    def write(self, data: Any) -> None:
        self._outer.write(data)

    def pause_reading(self) -> None:
        self._outer.pause_reading()

    def resume_reading(self) -> None:
        self._outer.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._outer.set_protocol(protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._outer.get_extra_info(name, default)
