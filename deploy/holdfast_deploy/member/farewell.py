"""How a node that has finished takes leave: nobody may be left waiting for it, nor it for somebody gone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from holdfast.core.files import write_atomic
from holdfast_deploy.member.base import GRACE
from holdfast_deploy.member.transport import together
from holdfast_deploy.storage.incarnations import MixedRunsError
from holdfast_deploy.wire.dialling import RefusedForGoodError, WaitLimitError

if TYPE_CHECKING:
    from holdfast_deploy.member.node import Node


def take_leave(node: Node) -> None:
    """Stays until nobody needs the node any more: all neighbours have finished, too, and know of it."""
    node.stage = node.federation.last_stage
    farewell = node.publish(node.header(0, ()), ())
    try:
        if node.federation.member_network.is_server:
            node.transport.to_server(farewell)
            node.ask(lambda: _goodbye(node))
        else:
            node.ask(lambda: _all_parted(node))
    except (WaitLimitError, RefusedForGoodError, MixedRunsError) as error:  # the model is written, and right
        node.events.log("finished, but a neighbour did not say so", "warning", reason=str(error))
        return
    node.insist(lambda: write_atomic(node.folder / "parted", b""))


async def _goodbye(node: Node) -> None:
    """The server need not stay for the node."""
    await (await node.transport.server()).release(node.stage)


async def _all_parted(node: Node) -> None:
    names = [node.federation.names[j] for j in node.companions]
    await together([_parted(node, name) for name in names])
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        if all(node.service.fetched.get(name, 0) >= node.stage for name in names):
            return
        await node.outbox.changed(1.0)


async def _parted(node: Node, name: str) -> None:
    """``name`` has finished: it says so, or is known to have, and may be gone."""
    link, until = await node.link(name), time.monotonic() + GRACE
    farewell = asyncio.ensure_future(link.fetch(node.stage, 0, []))
    # Where another roster begins, it may fail after nobody waits for it: asyncio would write that to the log.
    farewell.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        while not (await asyncio.wait([farewell], timeout=1.0))[0]:
            if time.monotonic() > until and node.store.decision(node.stage, 0, name):
                return
            if node.keeper is not None and node.keeper.lost(name):  # all others wait for one another
                return
        await farewell
        await node.decide(node.stage, 0, name, True)
    finally:
        farewell.cancel()
