"""What a member does about files of its own that turn out to be damaged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from holdfast_deploy.storage.disk_full import explained
from holdfast_deploy.storage.messages import BeyondRepairError, DamagedError
from holdfast_deploy.storage.store import FolderGoneError

if TYPE_CHECKING:
    from holdfast_deploy.member.base import Member

T = TypeVar("T")

WATCH = 1.0  # seconds between two looks at the folder


def recovering(member: Member, run: Callable[[], T], restore: Callable[[], None]) -> T:
    """``run``; if a file turns out to be damaged, once more from what is saved, as after a crash."""
    damage: set[str] = set()
    while True:
        try:
            return run()
        except OSError as error:
            member.store.require_folder()
            raise explained(error) from None
        except DamagedError as error:
            if str(error) in damage:
                raise BeyondRepairError(f"{error} again, after it was written anew: check the disk") from None
            damage.add(str(error))
            member.events.log("going back to what is saved", "warning", reason=str(error))
            member.waiting.failure = None
            member.service.bytes_served = 0
            for link in member.links.values():
                link.bytes_sent = link.bytes_received = 0
            member.retry_while_full(restore)


async def watch_folder(member: Member) -> None:
    """Ends the member where its folder is taken away: nothing that it goes on to do would be saved.

    So it does where one of the files is gone that are missed by nothing else until it is started again.
    """
    needed = [member.trail.path]
    if member.membership is not None:
        needed.append(member.membership.log.path)
    while True:
        await asyncio.sleep(WATCH)
        try:
            member.store.require_folder()
            for path in needed:
                os.stat(path)
        except FolderGoneError as error:
            member.give_up(error)
            return
        except FileNotFoundError as error:
            member.give_up(explained(error))
            return
