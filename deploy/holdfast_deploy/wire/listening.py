"""A gRPC server for a member: bounded, and with TLS 1.3 or on loopback."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from holdfast.core.errors import TRY_LATER, HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.disk_full import raise_file_limit
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.doorkeeper import Doorkeeper
from holdfast_deploy.wire.protocol import (
    CONNECTION,
    NAME_KEY,
    SERVICE,
    Answerer,
    Kind,
    Peer,
    Pieces,
    RefusedError,
    take_first,
)
from holdfast_deploy.wire.tls import speaks_tls_1_2

# Never gRPC's own answers:
FOR_GOOD, FORGED = grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS
CODES = {
    Kind.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Kind.UNKNOWN: grpc.StatusCode.UNIMPLEMENTED,
    Kind.TOO_SLOW: grpc.StatusCode.DEADLINE_EXCEEDED,
    Kind.DISAGREE: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.FOR_GOOD: FOR_GOOD,
    Kind.FORGED: FORGED,
    Kind.TOO_MUCH: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.NOT_YET: grpc.StatusCode.OUT_OF_RANGE,
    Kind.NO_ROOM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
STREAMS = 32  # calls of one connection: each may hold some pieces in memory
HANDSHAKE = 10.0  # seconds in which a caller has to prove who it is


async def serve(
    address: str, credentials: Credentials | None, answerer: Answerer, most: int, events: Events
) -> tuple[Any, int, Doorkeeper]:
    """Lets others ask ``answerer`` on ``address``; the server, its port, its door."""
    secure = credentials is not None

    def short(answer: Callable[[Peer, bytes], Awaitable[bytes]]) -> Callable[[Any, Any], Awaitable[bytes]]:
        async def handler(frames: Pieces, context: Any) -> bytes:
            async with _refusing(context):
                return await answer(peer_of(context, secure), await _only_frame(frames))
            raise AssertionError  # abort does not return

        return handler

    async def submit(frames: Pieces, context: Any) -> bytes:
        async with _refusing(context):
            return await answerer.submit(peer_of(context, secure), frames)
        raise AssertionError

    async def fetch(frames: Pieces, context: Any) -> AsyncGenerator[bytes, None]:
        async with _refusing(context):
            peer, body = peer_of(context, secure), await _only_frame(frames)
            async with aclosing(answerer.fetch(peer, body)) as pieces:
                async for piece in pieces:
                    yield piece

    answers = {name: short(answer) for name, answer in answerer.answers.items()} | {"Submit": submit}
    return await serve_calls(address, credentials, fetch, answers, most, events)


@asynccontextmanager
async def _refusing(context: Any) -> AsyncIterator[None]:
    """Tells the caller, in gRPC's words, why it is refused."""
    try:
        yield
    except RefusedError as error:
        await context.abort(CODES[error.kind], str(error))


async def _only_frame(frames: Pieces) -> bytes:
    try:
        return await take_first(frames)
    except TimeoutError:
        raise RefusedError(Kind.TOO_SLOW, "too slow") from None
    except HoldfastError as error:
        raise RefusedError(Kind.MALFORMED, str(error)) from None


async def serve_calls(
    address: str,
    credentials: Credentials | None,
    fetch: Callable[[Any, Any], AsyncGenerator[bytes, None]],
    answers: Mapping[str, Callable[[Any, Any], Awaitable[bytes]]],
    most: int,
    events: Events,
    service: str = SERVICE,
    streaming: str = "Fetch",
    streams: int = STREAMS,
) -> tuple[Any, int, Doorkeeper]:
    """Lets others ask on ``address``: ``fetch`` and ``answers``, by name; the server, its port, its door.

    There are at most ``most`` connections, with ``streams`` calls each, and at most half of the files that
    the process may open.
    """
    most = min(raise_file_limit() // 2, most)
    limits = [
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
        ("grpc.max_concurrent_streams", streams),
    ]
    server = grpc.aio.server(options=[*CONNECTION, *limits])
    door = Doorkeeper(most // 2, events, name_of=_certified_name)
    # All as streams: gRPC refuses frames above its limit by itself, which only a stream gets to know.
    handlers = {
        name: grpc.stream_unary_rpc_method_handler(door.seen(answer)) for name, answer in answers.items()
    }
    handlers[streaming] = grpc.stream_stream_rpc_method_handler(door.seen_streaming(fetch))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials.for_server())
    except RuntimeError:
        port = 0
    if port == 0:
        raise _why_not(address)
    await server.start()
    host = address.rpartition(":")[0].strip("[]")
    trial = "localhost" if host in ("::", "0.0.0.0") else host
    if credentials is not None and await speaks_tls_1_2(trial, port):
        await server.stop(0)
        raise HoldfastError(
            "gRPC was loaded first and would accept TLS 1.2; import holdfast_deploy.wire before it"
        )
    return server, port, door


class PortTakenError(HoldfastError):
    """Another process listens there, perhaps the one before that is about to end."""

    exit_code = TRY_LATER


def _why_not(address: str) -> HoldfastError:
    """Why nobody can listen on ``address``, which gRPC does not tell."""
    host, _, port = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return PortTakenError(f"cannot listen on {address}: the port was taken until just now; try again")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortTakenError(
                f"cannot listen on {address}: the port is taken; stop the program that has it, or listen "
                "elsewhere with --listen"
            )
        return HoldfastError(f"cannot listen on {address} ({error.strerror}): give another with --listen")


# --- who calls -------------------------------------------------------------------------------------------


def caller_name(context: Any, secure: bool) -> str:
    """The name in the caller's certificate, or without certificates the name it gives; "" if it has none."""
    if not secure:
        return metadata(context, NAME_KEY)
    names = context.auth_context().get("x509_subject_alternative_name", [])
    return str(names[0].decode(errors="replace")) if len(names) == 1 else ""


def _certified_name(context: Any) -> str | None:
    """For ``Doorkeeper.name_of``."""
    return (caller_name(context, secure=True) or None) if shown_by(context) else ""


def peer_of(context: Any, secure: bool) -> Peer:
    """Who calls, and what it says beside its question; what it says twice counts as not said."""
    said: dict[str, str] = {}
    for key, value in context.invocation_metadata() or ():
        said[key] = "" if key in said else str(value)
    shown = shown_by(context) if secure else b""
    return Peer(caller_name(context, secure), unquote(context.peer()), shown, said)


def shown_by(context: Any) -> bytes:
    """The caller's certificate, in PEM; b"" if it has none."""
    return b"".join(context.auth_context().get("x509_pem_cert", []))


def metadata(context: Any, wanted: str) -> str:
    """What the caller says beside its question; "" if it says nothing, or several things."""
    values = [str(value) for key, value in context.invocation_metadata() or () if key == wanted]
    return values[0] if len(values) == 1 else ""


# --- without certificates, a member talks to its own machine only ----------------------------------------


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def bind_address(address: str) -> str:
    """Where to listen: loopback as it is, otherwise all interfaces, since names inside may differ."""
    if not address or is_loopback(address):
        return address
    return f"[::]:{address.rpartition(':')[2]}"


def require_loopback(federation: Federation, listen: str | None) -> None:
    """No unencrypted traffic leaves the machine."""
    for address in [*(member.address for member in federation.members if member.address), listen]:
        if address is not None and not is_loopback(address):
            raise HoldfastError(
                f"--insecure: only for loopback addresses such as 127.0.0.1:7001, not {address}"
            )
