"""Members pass the coordinator's list of revoked certificates on: whoever has the newer one gives it."""

from __future__ import annotations

import asyncio

import grpc

from holdfast.core.errors import HoldfastError
from holdfast.engines.deploy.storage.messages import parse
from holdfast.engines.deploy.wire.dialling import Unreachable
from holdfast.engines.deploy.wire.links import Connection
from holdfast.engines.deploy.wire.revocations import Heard, list_for, take_over


async def share_revocations(link: Connection) -> bool:
    """With the member behind ``link``: a list that it has got is written down. Whether it was reached."""
    own = link.credentials
    if own is None or own.folder is None:
        return True
    known = theirs = own.revocations.number
    for _ in range(2):  # the second time if theirs is older
        question = list_for(own.folder, known, theirs).model_dump_json().encode()
        try:
            heard: Heard = parse(Heard, await link.say("Revocations", question))
            take_over(own.folder, known, heard, link.federation.coordinator)
        except (Unreachable, TimeoutError, grpc.aio.AioRpcError, grpc.aio.UsageError):
            return False
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return False  # the connection was closed by us: see ``Connection.drop_if_revoked``
        except (HoldfastError, OSError) as error:
            link.events.complain("revocations", peer=link.peer, reason=str(error))
            return True
        theirs = heard.number
        if theirs >= known:
            break
    return True
