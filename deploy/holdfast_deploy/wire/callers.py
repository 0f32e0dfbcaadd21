"""Who may ask: members, with certificates that hold, not too much at a time. All others get a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.links import ForgedError, MixedRunsError, PutBackError
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.protocol import Kind, Peer, RefusedError

MOST_CALLS = 16  # of one member at a time; each may hold some pieces in memory


@dataclass
class Callers:
    """The members that may ask, and what they ask right now."""

    members: set[str]
    events: Events
    give_up: Callable[[Exception], None]
    credentials: Credentials | None = None  # None: not known yet, or there are none
    calls: Counter[str] = field(default_factory=Counter)  # of each member, under way

    @asynccontextmanager
    async def authorised(self, peer: Peer) -> AsyncIterator[str]:
        """A call under way: who calls, and a ``RefusedError`` for whatever goes wrong."""
        who = peer.name
        if who not in self.members:
            raise self._refused(who, Kind.NOT_ALLOWED, "not a member of the federation")
        if self.calls[who] >= MOST_CALLS:
            raise self._refused(who, Kind.TOO_MUCH, "too many calls at a time")
        self.calls[who] += 1
        try:
            self._certified(who, peer.certificate)
            yield who
        except RefusedError as error:
            raise self._refused(who, error.kind, str(error)) from None
        except (MixedRunsError, ForgedError) as error:  # both ends stop: neither can tell what is wanted
            self.give_up(error)
            kind = Kind.FORGED if isinstance(error, ForgedError) else Kind.FOR_GOOD
            raise self._refused(who, kind, str(error)) from None
        except PutBackError as error:  # this end stops; the other waits for it
            self.give_up(error)
            raise self._refused(who, Kind.DISAGREE, str(error)) from None
        except HoldfastError as error:
            raise self._refused(who, Kind.MALFORMED, str(error)) from None
        except TimeoutError:
            raise self._refused(who, Kind.TOO_SLOW, "too slow, or sent anew") from None
        except ConnectionError:  # the caller has gone
            raise
        except OSError as error:  # such as a full disk: the caller tries again
            reason = f"cannot be read or saved: {error.strerror}"
            raise self._refused(who, Kind.NO_ROOM, reason) from None
        finally:
            self.calls[who] -= 1

    def _certified(self, who: str, shown: bytes) -> None:
        """Refuses a certificate that was revoked, or is not by the authority that vouches for its name."""
        if self.credentials is None or not shown:
            return
        try:
            self.credentials.check(who, shown)
        except HoldfastError as error:
            raise RefusedError(Kind.FOR_GOOD, str(error)) from None

    def _refused(self, who: str, kind: Kind, reason: str) -> RefusedError:
        self.events.complain("refused", peer=who[:80] or "somebody", reason=reason)
        return RefusedError(kind, reason)
