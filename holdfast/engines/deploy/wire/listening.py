"""A gRPC server for a member: bounded, and with TLS 1.3 or on loopback."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.ops.events import Events
from holdfast.engines.deploy.storage.scarcity import raise_file_limit
from holdfast.engines.deploy.wire.credentials import Credentials, speaks_tls_1_2
from holdfast.engines.deploy.wire.doorkeeper import Doorkeeper
from holdfast.engines.deploy.wire.protocol import CONNECTION, SERVICE

HANDSHAKE = 10.0  # seconds in which a caller has to prove who it is


async def serve(
    address: str,
    credentials: Credentials | None,
    fetch: Callable[[Any, Any], AsyncGenerator[bytes, None]],
    answers: Mapping[str, Callable[[Any, Any], Awaitable[bytes]]],
    most: int,
    events: Events,
) -> tuple[Any, int, Doorkeeper]:
    """Lets others ask on ``address``: ``Fetch``, and what ``answers`` names; the server, its port, its door.

    There are at most ``most`` connections, and at most half of the files that the process may open.
    """
    most = min(raise_file_limit() // 2, most)
    limits = [
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE)),
    ]
    server, door = grpc.aio.server(options=[*CONNECTION, *limits]), Doorkeeper(most // 2, events)
    # All as streams: gRPC refuses frames above its limit by itself, which only a stream gets to know.
    handlers = {
        name: grpc.stream_unary_rpc_method_handler(door.seen(answer)) for name, answer in answers.items()
    }
    handlers["Fetch"] = grpc.stream_stream_rpc_method_handler(door.seen_streaming(fetch))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials.for_server())
    except RuntimeError:
        port = 0
    if port == 0:
        raise HoldfastError(f"cannot listen on {address}: is the port taken, or the address not ours?")
    await server.start()
    host = address.rpartition(":")[0].strip("[]")
    trial = "localhost" if host in ("::", "0.0.0.0") else host
    if credentials is not None and await speaks_tls_1_2(trial, port):
        await server.stop(0)
        raise HoldfastError("gRPC was loaded before holdfast and would accept TLS 1.2; import holdfast first")
    return server, port, door
