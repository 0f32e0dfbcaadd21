"""Without certificates, a member talks to its own machine only."""

from __future__ import annotations

import ipaddress

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.federation import Federation


def is_loopback(address: str) -> bool:
    """Whether host:port can be reached from this machine only."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def require_loopback(federation: Federation, listen: str | None) -> None:
    """No unencrypted traffic leaves the machine."""
    for address in [*(member.address for member in federation.members if member.address), listen]:
        if address is not None and not is_loopback(address):
            raise HoldfastError(
                f"--insecure: only for loopback addresses such as 127.0.0.1:7001, not {address}"
            )
