"""``holdfast node``, ``holdfast server`` and ``holdfast federation relay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.core.errors import HoldfastError, unknown
from holdfast_deploy.cli.options import (
    Accept,
    Certs,
    File,
    Folder,
    Insecure,
    Listen,
    Log,
    Model,
    Monitor,
    Name,
    PolicyFile,
)

if TYPE_CHECKING:
    from holdfast_deploy.federation_file import FederationFile
    from holdfast_deploy.member.network import Hosting
    from holdfast_deploy.member.session import Session


def node(
    file: File,
    name: Name,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.npz|module:function",
            help="Your npz file: x_train, y_train and, if any, x_test, y_test. Or your own function.",
        ),
    ],
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda or cuda:N.")] = "cpu",
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Take part in a federation, next to your own data; they never leave this machine.

    Ctrl-C, a crash or a power cut lose nothing: the same command continues where it stopped.
    """
    from holdfast.core.files import private_files
    from holdfast_deploy.cli.hosting import host, member_credentials, member_log
    from holdfast_deploy.consent import is_signed, require_consent, require_policies
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.member.node import open_node
    from holdfast_deploy.site import names_code, open_site, own_data

    with private_files(), member_log(name, log) as events:
        federation = read_federation(file, model)
        if name not in federation.names and federation.membership is None:  # else it may be added
            raise unknown("node in the federation", name, federation.names)
        keys = None if insecure else certs or file.parent / "certs"
        credentials = member_credentials(federation, name, keys, listen)
        for_consent: dict[str, Any] = {
            "policy": policy,
            "name": name,
            "own_code": model is not None or names_code(data),
        }
        require_consent(federation, file, keys, accepting=accept, **for_consent)
        federation, own = federation.running(), own_data(data, name)
        where = folder or file.parent / f"node-{name}"

        def make(now: FederationFile, hosting: Hosting) -> Session:
            # ``now``: as members have changed.
            require_policies(now, signed=is_signed(file, federation), **for_consent)
            return open_node(now, name, where, open_site(now, name, own, device), **hosting)

        host(federation, name, where, credentials, events, make, listen=listen, log=log, monitor=monitor)


def server(
    file: File,
    name: Name,
    model: Model = None,
    folder: Folder = None,
    certs: Certs = None,
    listen: Listen = None,
    insecure: Insecure = False,
    log: Log = "progress",
    monitor: Monitor = None,
    accept: Accept = None,
    policy: PolicyFile = None,
) -> None:
    """Serve a federation with a central method; the server has no data."""
    from holdfast.core.files import private_files
    from holdfast_deploy.cli.hosting import host, member_credentials, member_log
    from holdfast_deploy.consent import require_consent
    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.member.server import open_server
    from holdfast_deploy.site import initial_model

    with private_files(), member_log(name, log) as events:
        federation = read_federation(file, model)
        if federation.server is None:
            raise HoldfastError(f"{file} has no [server]: its nodes talk to one another directly")
        if name != federation.server.name:
            raise unknown("server in the federation", name, [federation.server.name])
        keys = None if insecure else certs or file.parent / "certs"
        credentials = member_credentials(federation, name, keys, listen)
        for_consent: dict[str, Any] = {"policy": policy, "name": name, "own_code": model is not None}
        require_consent(federation, file, keys, accepting=accept, **for_consent)
        where = folder or file.parent / f"server-{name}"

        def make(now: FederationFile, hosting: Hosting) -> Session:
            return open_server(now, where, initial_model(now), **hosting)

        federation = federation.running()
        host(federation, name, where, credentials, events, make, listen=listen, log=log, monitor=monitor)


def relay(file: File, certs: Certs = None, listen: Listen = None) -> None:
    """Pass messages between members that cannot reach each other directly; the relay cannot read them."""
    import asyncio
    import signal
    import sys

    from holdfast_deploy.federation_file import read_federation
    from holdfast_deploy.ops.events import Events, json_lines
    from holdfast_deploy.relay.relay import Relay
    from holdfast_deploy.wire.credentials import load_credentials
    from holdfast_deploy.wire.listener import bind_address

    federation = read_federation(file)
    own = federation.relay
    if own is None:
        raise HoldfastError(f"{file} has no [relay]: add one with a name and an address")
    credentials = load_credentials(certs or file.parent / "certs", own.name, federation.coordinator)
    events = Events(own.name, json_lines)

    async def serve() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        relay = Relay(federation, events)
        port = await relay.serve(listen or bind_address(own.address), credentials)
        events.log("relaying", port=port)
        await stopped.wait()
        await relay.close()
        events.log("stopped", calls=relay.joined, bytes=relay.bytes)

    asyncio.run(serve())
    print("stopped; it has nothing to save, and the same command continues", file=sys.stderr)
