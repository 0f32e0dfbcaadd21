"""Federations whose members talk through a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from federation_runs import DeployedRun, free_ports
from roster_runs import Threads

from holdfast_deploy.member.network import NetworkThread
from holdfast_deploy.ops.events import Events
from holdfast_deploy.relay.relay import Relay


def relayed(raw: dict[str, Any], outgoing: str, links: list[list[str]] | None = None) -> dict[str, Any]:
    """``raw`` with a relay; the nodes in ``outgoing`` have no port of their own."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    nodes = [{"name": n["name"]} if n["name"] in outgoing else n for n in raw["node"]]
    return raw | {"node": nodes, "relay": {"name": "relay", "address": address, "links": links or []}}


@contextmanager
def relaying(run: DeployedRun | Threads, kind: type[Relay] = Relay) -> Iterator[Relay]:
    """A relay in a thread of this process."""
    network, federation = NetworkThread(), run.file if isinstance(run, Threads) else run.federation
    assert federation.relay is not None
    relay = kind(federation, Events("relay", run.log.append))
    serving = relay.serve(federation.relay.address, run.credentials("relay"))
    asyncio.run_coroutine_threadsafe(serving, network.loop).result(30)
    try:
        yield relay
    finally:
        asyncio.run_coroutine_threadsafe(relay.close(), network.loop).result(30)
        network.close()
