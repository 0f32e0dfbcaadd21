"""Where a member waits until it takes part: it is let in, or the epoch begins that it can go on in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.member.keeper import Keeper
from holdfast.engines.deploy.wire.dialling import WaitLimitError
from holdfast.engines.deploy.wire.listening import serve

MOST_STRANGERS = 4096  # connections meanwhile


def admit(keeper: Keeper, listen: str | None, wait: Callable[[Any], None]) -> None:
    """Waits until the member takes part; meanwhile it answers others, on ``listen`` if given.

    ``wait`` runs a coroutine on the event loop to its end.
    """
    epoch = keeper.voter.epoch
    if epoch.order is not None and (epoch.order.change, epoch.order.name) == ("remove", keeper.name):
        raise HoldfastError(f"the coordinator has removed {keeper.name} after round {epoch.first}")
    wait(_lobby(keeper, listen))


async def _lobby(keeper: Keeper, listen: str | None) -> None:
    server, keeping, since = None, None, keeper.now
    try:
        keeper.look_for_order()
    except HoldfastError as error:
        keeper.events.complain("membership", reason=str(error))
    if listen is not None and _outside(keeper):
        server, port, door = await serve(
            listen, keeper.credentials, keeper.fetch, keeper.answers, MOST_STRANGERS, keeper.events
        )
        keeping = asyncio.create_task(door.keep(port))
    try:
        while _outside(keeper):
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
