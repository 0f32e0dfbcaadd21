"""A member from its start to its end: one ``Member`` for each epoch, and what lasts through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.member.base import Member
from holdfast.engines.deploy.member.keeper import EpochChanged, Keeper
from holdfast.engines.deploy.member.lobby import admit
from holdfast.engines.deploy.member.network import Hosting, NetworkThread
from holdfast.engines.deploy.ops.events import Events
from holdfast.engines.deploy.storage.messages import BeyondRepairError
from holdfast.engines.deploy.wire.credentials import Credentials

M = TypeVar("M", bound=Member)
T = TypeVar("T")


def run_through_epochs(
    federation: Federation,
    name: str,
    folder: Path,
    credentials: Credentials | None,
    events: Events,
    make: Callable[[Any, Hosting], M],
    run: Callable[[M], T],
    *,
    listen: str | None = None,
    network: NetworkThread | None = None,
) -> T:
    """What ``run`` gives for the member that ``make`` makes; both are called again in every epoch.

    ``make`` gets the federation as it is in that epoch. ``listen``: where others reach the member.
    """
    if federation.membership is None:
        with make(federation, Hosting(credentials=credentials, events=events, network=network)) as member:
            return run(member)
    shared = network or NetworkThread()
    keeper = Keeper(federation, name, folder, credentials, events, shared)
    try:
        while True:
            admit(keeper, listen, lambda waiting: _wait(shared, waiting))
            hosting = Hosting(credentials=credentials, events=events, network=shared, keeper=keeper)
            try:
                with make(keeper.voter.federation, hosting) as member:
                    return run(member)
            except EpochChanged:
                continue
            except BeyondRepairError as error:
                keeper.begin_anew(error)
    finally:
        keeper.close()
        if network is None:
            shared.close()


def _wait(network: NetworkThread, waiting: Any) -> None:
    future = asyncio.run_coroutine_threadsafe(waiting, network.loop)
    try:
        future.result()
    finally:
        future.cancel()
