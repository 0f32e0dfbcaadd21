"""What a member runs beside its computing."""

from __future__ import annotations

import asyncio
import threading
from typing import NotRequired, TypedDict

from holdfast_deploy.membership.service import MembershipService
from holdfast_deploy.ops.events import Events
from holdfast_deploy.wire.credentials import Credentials


class NetworkThread:
    """An event loop in a thread of its own: it answers others while the member computes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="network", daemon=True)
        self.thread.start()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


async def _end_all() -> None:
    """Ends what is still under way: a loop that is closed before would complain on standard error."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)


class Hosting(TypedDict):
    """What surrounds a member."""

    credentials: Credentials | None
    events: Events
    network: NotRequired[NetworkThread | None]  # shared by several members of one process
    rosters: NotRequired[MembershipService | None]  # where members may change
