"""Members pass the coordinator's lists of revoked certificates on: each gives what the other lacks."""

from __future__ import annotations

from holdfast.core.errors import HoldfastError
from holdfast_deploy.storage.messages import parse
from holdfast_deploy.wire.client import Connection
from holdfast_deploy.wire.dial import Unreachable
from holdfast_deploy.wire.protocol import REVOCATIONS, RefusedError
from holdfast_deploy.wire.revocations import Heard

TURNS = 8  # of one talk; most often, both have the same list


async def share_revocations(link: Connection) -> bool:
    """With the member behind ``link``: each learns what it lacks. Whether the other was reached."""
    own = link.credentials
    if own is None:
        return True
    question = own.revocations.tell()
    for _ in range(TURNS):
        try:
            said = await link.say(REVOCATIONS, question.model_dump_json().encode())
            heard: Heard = parse(Heard, said)
            if heard.lacking is not None:
                own.learn(heard.lacking, link.federation.coordinator)
        except (Unreachable, TimeoutError, RefusedError):
            return False
        except HoldfastError as error:
            link.events.complain("revocations", peer=link.peer, reason=str(error))
            return True
        question = own.revocations.tell(heard.have)
        if set(heard.have) == set(question.have):
            break
    return True
