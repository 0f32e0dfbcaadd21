"""Connections to other members, what gRPC says when they fail, and the two ends of waiting in vain."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any

import grpc

from holdfast.core.errors import REFUSED, TRY_LATER, HoldfastError, printable
from holdfast_deploy.federation import Federation
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.protocol import CONNECTION
from holdfast_deploy.wire.proxies import proxy_to
from holdfast_deploy.wire.tls import see_certificate

NO_ANSWER = "it cannot be reached"
LONGEST_REASON = 500  # characters of what a peer says about its refusal

RECONNECTION = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
]


class Unreachable(Exception):  # noqa: N818 - not an error of anybody's
    """Nobody answers at a member's address, or somebody who is not that member."""


async def look(federation: Federation, peer: str, credentials: Credentials | None) -> bytes | None:
    """The certificate that ``peer`` shows, checked; None if there is nothing to look at.

    gRPC checks certificates, but neither tells us which one it saw nor knows those that were revoked. So we
    look first, through the same proxy if there is one, and then let gRPC talk to that certificate alone. So
    nothing is gained by showing us one certificate and gRPC another.
    """
    if credentials is None or credentials.folder is None:
        return None
    host, _, port = federation.member(peer).address.rpartition(":")
    host = host.strip("[]")
    try:
        shown = await see_certificate(host, int(port), peer, credentials, proxy_to(host))
    except ssl.SSLCertVerificationError:
        raise Unreachable(f"{NO_ANSWER} (certificate)") from None
    except socket.gaierror:
        raise Unreachable(f"{NO_ANSWER} (its host name is not known)") from None
    except (OSError, EOFError):
        raise Unreachable(NO_ANSWER) from None
    try:
        credentials.check(peer, shown)
    except HoldfastError as error:
        raise Unreachable(str(error)) from None
    return shown


def open_channel(
    federation: Federation, peer: str, credentials: Credentials | None, shown: bytes | None = None
) -> Any:
    """A connection that is made when needed; the other end must show a certificate in the peer's name.

    ``shown``: the only certificate that it may show.
    """
    address = next(member.address for member in federation.certified if member.name == peer)
    options: list[tuple[str, int | str]] = [*CONNECTION, *RECONNECTION]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", peer))
    trusted = shown or credentials.authority_of(peer)
    return grpc.aio.secure_channel(address, credentials.for_client(trusted), options=options)


def reason(error: Any) -> str:
    """What gRPC has to say, in a few words."""
    details = " ".join((error.details() or "").split())
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return NO_ANSWER + (" (certificate)" if "erification" in details else "")
    return printable(details)[:LONGEST_REASON] or error.code().name


class WaitLimitError(HoldfastError):
    """A neighbour was waited for in vain; the member can be started again."""

    exit_code = TRY_LATER


class RefusedForGoodError(HoldfastError):
    """Another member will never give what was asked for: going on together is impossible."""

    exit_code = REFUSED


@dataclass
class Wait:
    """Who is waited for, since when, and what the matter is."""

    peer: str
    since: float
    problem: str = ""

    def __str__(self) -> str:
        seconds = time.monotonic() - self.since
        passed = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        return f"waiting for {self.peer} ({passed})" + (f": {self.problem}" if self.problem else "")
