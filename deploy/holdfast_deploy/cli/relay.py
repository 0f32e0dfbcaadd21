"""``holdfast federation relay``."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast_deploy.federation_file import read_federation
from holdfast_deploy.ops.events import Events, json_lines
from holdfast_deploy.relay.relay import Relay
from holdfast_deploy.wire.credentials import load_credentials
from holdfast_deploy.wire.handshakes import watch_handshakes
from holdfast_deploy.wire.listening import bind_address


def run_relay(path: Path, certs: Path | None, listen: str | None) -> None:
    """Passes on what members cannot tell one another directly, until it is stopped."""
    federation = read_federation(path)
    if federation.relay is None:
        raise HoldfastError(f"{path} has no [relay]: add one with a name and an address")
    name = federation.relay.name
    credentials = load_credentials(certs or path.parent / "certs", name, federation.coordinator)
    events = Events(name, json_lines)

    async def serve() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        assert federation.relay is not None
        relay = Relay(federation, events)
        port = await relay.serve(listen or bind_address(federation.relay.address), credentials)
        events.log("relaying", port=port)
        await stopped.wait()
        await relay.close()
        events.log("stopped", parcels=relay.parcels, bytes=relay.bytes)

    with watch_handshakes(events):
        asyncio.run(serve())
    print("stopped; it has nothing to save, and the same command goes on", file=sys.stderr)
