"""The HTTP proxy that the environment names, and what asks it for a connection."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from holdfast.core.errors import HoldfastError

DEFAULT_PORT = 443


@dataclass(frozen=True)
class Proxy:
    """Where it listens, and ``user:password`` if it asks for that."""

    host: str
    port: int
    secret: str = field(default="", repr=False)


def proxy_to(host: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy through which ``host`` is dialled; None: it is dialled directly.

    Of ``https_proxy`` and ``http_proxy`` the first that is set counts, if it names an HTTP proxy.
    """
    name = next((n for n in ("https_proxy", "http_proxy") if n in environment), "")
    spared = environment.get("no_proxy", "")
    try:
        given = urlsplit(environment.get(name, ""))
        if given.scheme != "http" or not given.hostname or _spared(host, spared):
            return None
        secret = unquote(given.netloc.rpartition("@")[0])
        return Proxy(given.hostname, given.port or DEFAULT_PORT, secret)
    except ValueError:  # not shown: it may hold a password
        raise HoldfastError(f"the environment's {name} names no proxy: expected http://HOST:PORT") from None


def _spared(host: str, spared: str) -> bool:
    """Whether the list ``spared`` has the end of the name ``host``, or a network that this address is in."""
    entries = [entry.strip() for entry in spared.split(",") if entry]
    return any(host.lower().endswith(entry.lower()) or _within(host, entry) for entry in entries)


def _within(host: str, network: str) -> bool:
    try:
        return ip_address(host) in ip_network(network, strict=False)
    except ValueError:  # one of them is a name
        return False


def connect_request(proxy: Proxy, host: str, port: int) -> bytes:
    """What asks ``proxy`` for a connection to ``host``."""
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if proxy.secret:
        request.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.secret.encode()).decode()}")
    return "\r\n".join([*request, "", ""]).encode()
