"""How a node finishes: no member is left waiting for it, and it does not wait for one that is gone."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from holdfast.core.files import write_atomic
from holdfast_deploy.member.base import GRACE
from holdfast_deploy.member.transport import gather
from holdfast_deploy.storage.links import MixedRunsError
from holdfast_deploy.wire.dialling import RefusedForGoodError, WaitLimitError

if TYPE_CHECKING:
    from holdfast_deploy.member.node import Node


def finish(node: Node) -> None:
    """Stays until nobody needs the node any more: all neighbours have finished, too, and know of it."""
    node.message_round = node.federation.last_message_round
    final = node.publish(node.header(0, ()), ())
    try:
        if node.federation.member_network.is_server:
            node.transport.to_server(final)
            node.run_on_loop(lambda: _release_server(node))
        else:
            node.run_on_loop(lambda: _all_finished(node))
    except (WaitLimitError, RefusedForGoodError, MixedRunsError) as error:  # the model is written, and right
        node.events.log("finished, but a neighbour did not say so", "warning", reason=str(error))
        return
    node.retry_while_full(lambda: write_atomic(node.folder / "parted", b""))


async def _release_server(node: Node) -> None:
    """The server need not stay for the node."""
    await (await node.transport.server()).release(node.message_round)


async def _all_finished(node: Node) -> None:
    names = [node.federation.names[j] for j in node.companions]
    await gather([_finished(node, name) for name in names])
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        if all(node.service.fetched.get(name, 0) >= node.message_round for name in names):
            return
        await node.outbox.changed(1.0)


async def _finished(node: Node, name: str) -> None:
    """``name`` has finished: it says so, or is known to have, and may be gone."""
    link, until = await node.link(name), time.monotonic() + GRACE
    final = asyncio.ensure_future(link.fetch(node.message_round, 0, []))
    # Where another roster begins, it may fail after nobody waits for it: asyncio would write that to the log.
    final.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        while not (await asyncio.wait([final], timeout=1.0))[0]:
            if time.monotonic() > until and node.store.decision(node.message_round, 0, name):
                return
            if node.keeper is not None and node.keeper.lost(name):  # all others wait for one another
                return
        await final
        await node.decide(node.message_round, 0, name, True)
    finally:
        final.cancel()
