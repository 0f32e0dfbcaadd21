"""How a node finishes: no member is left waiting for it, and it does not wait for one that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from holdfast.core.files import write_atomic
from holdfast_deploy.member.exchange import gather
from holdfast_deploy.member.session import Session
from holdfast_deploy.storage.links import MixedRunsError
from holdfast_deploy.wire.retry import RefusedForGoodError, WaitLimitError

GRACE = 15.0  # seconds that a finished member stays for answers that got lost


def finish(session: Session, companions: Sequence[str]) -> None:
    """Stays until no other member needs this node: its ``companions`` have finished, too, and know of it."""
    federation = session.federation
    session.exchange.message_round = federation.last_message_round
    final = session.exchange.publish((session.exchange.message_round, 0), ())
    try:
        if federation.server is not None:
            session.exchange.submit(final)
            server = federation.server.name
            session.waiting.run_interruptible(lambda: _release(session, server))
        else:
            session.waiting.run_interruptible(lambda: _all_finished(session, companions))
    except (WaitLimitError, RefusedForGoodError, MixedRunsError) as error:  # the model is written, and right
        session.events.log("finished, but a neighbour did not say so", "warning", reason=str(error))
        return
    session.exchange.retry_while_full(lambda: write_atomic(session.folder / "parted", b""))


async def _release(session: Session, server: str) -> None:
    """The server need not stay for the node."""
    await session.connections.to(server).release(session.exchange.message_round)


async def _all_finished(session: Session, names: Sequence[str]) -> None:
    await gather([_finished(session, name) for name in names])
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        if all(session.service.fetched.get(name, 0) >= session.exchange.message_round for name in names):
            return
        await session.outbox.changed(1.0)


async def _finished(session: Session, name: str) -> None:
    """``name`` has finished: it says so, or is known to have, and may be gone."""
    link, until = session.connections.to(name), time.monotonic() + GRACE
    key = (session.exchange.message_round, 0)
    final = asyncio.ensure_future(link.fetch(*key, []))
    # Where another roster begins, it may fail after nobody waits for it: asyncio would write that to the log.
    final.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        while not (await asyncio.wait([final], timeout=1.0))[0]:
            if time.monotonic() > until and session.store.decision(*key, name):
                return
            if session.lost(name):  # all others wait for one another
                return
        await final
        await session.exchange.decide(key, name, True)
    finally:
        final.cancel()
