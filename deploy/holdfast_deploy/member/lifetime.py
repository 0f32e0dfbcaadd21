"""A member from its start to its end: one ``Member`` for each roster, and what lasts through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.federation import Federation
from holdfast_deploy.member.base import Member
from holdfast_deploy.member.network import Hosting, NetworkThread
from holdfast_deploy.member.status import status_outside
from holdfast_deploy.membership.service import Keeper, RosterChanged
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.messages import BeyondRepairError
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.dialling import WaitLimitError
from holdfast_deploy.wire.listening import serve

MOST_STRANGERS = 4096  # connections meanwhile

M = TypeVar("M", bound=Member)
T = TypeVar("T")


class RemovedError(HoldfastError):
    """The coordinator has ordered the others to go on without this member."""

    exit_code = REFUSED

    def __init__(self, name: str, round: int) -> None:
        super().__init__(
            f"the coordinator has removed {name} after round {round}; once it has run 'holdfast federation "
            "add', start the same command again"
        )


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
    outside: Callable[[Callable[[], dict[str, Any]]], None] = lambda _: None,
) -> T:
    """What ``run`` gives for the member that ``make`` makes; both are called again in every roster.

    ``make`` gets the federation as it is in that roster. ``listen``: where others reach the member.
    ``outside`` is given what tells the status of a member that has to wait until it takes part.
    """
    if federation.membership is None:
        with make(federation, Hosting(credentials=credentials, events=events, network=network)) as member:
            return run(member)
    shared = network or NetworkThread()
    keeper = Keeper(federation, name, folder, credentials, events, shared.loop)
    try:
        while True:
            outside(partial(status_outside, keeper, keeper.now))
            _wait(shared, _admission(keeper, listen))
            hosting = Hosting(credentials=credentials, events=events, network=shared, keeper=keeper)
            try:
                with make(keeper.voter.federation, hosting) as member:
                    return run(member)
            except RosterChanged:
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


# --- until it is let in, or the roster begins that it can go on in ------------------------------------------


async def _admission(keeper: Keeper, listen: str | None) -> None:
    """Waits until the member takes part; meanwhile it answers others, on ``listen`` if given."""
    server, keeping, since = None, None, keeper.now
    keeper.look_for_order()
    if listen is not None and _outside(keeper):
        server, port, door = await serve(listen, keeper.credentials, keeper, MOST_STRANGERS, keeper.events)
        keeping = asyncio.create_task(door.keep(port))
    try:
        while _outside(keeper):
            if (removal := keeper.removal) is not None:
                raise RemovedError(keeper.name, removal.first)
            if keeper.now - since > keeper.file.limits.wait:
                problem = keeper.problem or "fewer than half of the members could be reached"
                raise WaitLimitError(
                    f"{problem}; that is the limit (limits.wait). Start the same command again to go on"
                )
            await asyncio.sleep(min(keeper.pause, 0.2))
    finally:
        if server is not None and keeping is not None:
            keeping.cancel()
            await server.stop(0)


def _outside(keeper: Keeper) -> bool:
    return not keeper.voter.admitted or keeper.waits_for_another
