"""A member from its start to its end: one ``Session`` for each roster, and what lasts through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast_deploy.federation import Federation
from holdfast_deploy.member.network import Hosting, NetworkThread
from holdfast_deploy.member.session import Session
from holdfast_deploy.member.status import status_outside
from holdfast_deploy.membership.roster import RosterChanged
from holdfast_deploy.membership.service import MembershipService
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import BeyondRepairError
from holdfast_deploy.wire.credentials import Credentials

T = TypeVar("T")


def run_through_rosters(
    federation: Federation,
    name: str,
    folder: Path,
    credentials: Credentials | None,
    events: Events,
    make: Callable[[Any, Hosting], Session],
    run: Callable[[Session], T],
    *,
    listen: str | None = None,
    network: NetworkThread | None = None,
    outside: Callable[[Callable[[], dict[str, Any]]], None] = lambda _: None,
) -> T:
    """The result of ``run`` for the member that ``make`` makes; both are called again in every roster.

    ``make`` gets the federation as it is in that roster. ``listen``: where others reach the member.
    ``outside`` receives what tells the status of a member that has to wait until it takes part.
    """
    if federation.membership is None:
        with make(federation, Hosting(credentials=credentials, events=events, network=network)) as member:
            return run(member)
    shared = network or NetworkThread()
    service = MembershipService(federation, name, folder, credentials, events, shared.loop)
    try:
        while True:
            outside(partial(status_outside, service, shared.loop.time()))
            _wait(shared, service.admit(listen))
            hosting = Hosting(credentials=credentials, events=events, network=shared, rosters=service)
            try:
                with make(service.view.log.federation, hosting) as member:
                    return run(member)
            except RosterChanged:
                continue
            except BeyondRepairError as error:
                service.start_again(error)
    finally:
        service.close()
        if network is None:
            shared.close()


def _wait(network: NetworkThread, waiting: Coroutine[Any, Any, None]) -> None:
    future = asyncio.run_coroutine_threadsafe(waiting, network.loop)
    try:
        future.result()
    finally:
        future.cancel()
