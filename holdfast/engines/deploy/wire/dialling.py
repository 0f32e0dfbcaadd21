"""Connections to other members, and what gRPC says when they fail."""

from __future__ import annotations

from typing import Any

import grpc

from holdfast.core.errors import printable
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.wire.credentials import Credentials
from holdfast.engines.deploy.wire.protocol import CONNECTION

LONGEST_REASON = 300  # characters of what a peer says about its refusal

RECONNECTION = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
]


def open_channel(federation: Federation, peer: str, credentials: Credentials | None) -> Any:
    """A connection that is made when needed; the other end must show a certificate in the peer's name."""
    address = federation.member(peer).address
    options: list[tuple[str, int | str]] = [*CONNECTION, *RECONNECTION]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", peer))
    return grpc.aio.secure_channel(address, credentials.for_client(), options=options)


def reason(error: Any) -> str:
    """What gRPC has to say, in a few words."""
    details = " ".join((error.details() or "").split())
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "it cannot be reached" + (" (certificate)" if "erification" in details else "")
    return printable(details)[:LONGEST_REASON] or error.code().name
