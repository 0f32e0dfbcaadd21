"""Who may ask: members, with certificates that hold, not too much at a time. Everybody else gets a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.incarnations import MixedRunsError
from holdfast_deploy.storage.tally import ForgedError, PutBackError
from holdfast_deploy.wire.credentials import Credentials
from holdfast_deploy.wire.doorkeeper import Doorkeeper
from holdfast_deploy.wire.listening import caller_name, shown_by
from holdfast_deploy.wire.protocol import FOR_GOOD, FORGED

Code = grpc.StatusCode

MOST_CALLS = 16  # of one member at a time; each may hold a frame in memory


class RefusedError(HoldfastError):
    """A call that is answered with an error ``code`` other than INVALID_ARGUMENT."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass
class Gate:
    """Where every call comes in."""

    members: set[str]
    events: Events
    give_up: Callable[[Exception], None]
    secure: bool = True  # with certificates
    credentials: Credentials | None = None  # None: not known yet, or there are none
    door: Doorkeeper | None = None
    calls: Counter[str] = field(default_factory=Counter)  # of each member, under way
    _under_way: Counter[tuple[str, bytes, str]] = field(
        default_factory=Counter
    )  # who, its certificate, its connection

    @asynccontextmanager
    async def call(self, context: Any) -> AsyncIterator[str]:
        """A call under way: who calls, and an answer for whatever goes wrong."""
        who = caller_name(context, self.secure)
        if who not in self.members:
            await self._refuse(context, who, Code.PERMISSION_DENIED, "not a member of the federation")
        if self.calls[who] >= MOST_CALLS:
            await self._refuse(context, who, Code.RESOURCE_EXHAUSTED, "too many calls at a time")
        self.calls[who] += 1
        shown = shown_by(context) if self.secure else b""
        call = (who, shown, context.peer())
        self._under_way[call] += 1
        try:
            self._certified(who, shown)
            yield who
        except RefusedError as error:
            await self._refuse(context, who, error.code, str(error))
        except (MixedRunsError, ForgedError) as error:  # both ends stop: neither can tell what is wanted
            try:
                code = FORGED if isinstance(error, ForgedError) else FOR_GOOD
                await self._refuse(context, who, code, str(error))
            finally:  # after the answer is on its way
                self.give_up(error)
        except PutBackError as error:  # this end stops; the other waits for it
            try:
                await self._refuse(context, who, Code.FAILED_PRECONDITION, str(error))
            finally:
                self.give_up(error)
        except HoldfastError as error:
            await self._refuse(context, who, Code.INVALID_ARGUMENT, str(error))
        except TimeoutError:
            await self._refuse(context, who, Code.DEADLINE_EXCEEDED, "too slow, or sent anew")
        except OSError as error:  # such as a full disk: the caller tries again
            await self._refuse(
                context, who, Code.RESOURCE_EXHAUSTED, f"cannot be read or saved: {error.strerror}"
            )
        finally:
            self.calls[who] -= 1
            self._under_way -= Counter([call])

    def _certified(self, who: str, shown: bytes) -> None:
        """Refuses a certificate that was revoked, or is not by the authority that vouches for its name."""
        if self.credentials is None or not shown:
            return
        try:
            self.credentials.check(who, shown)
        except HoldfastError as error:
            raise RefusedError(FOR_GOOD, str(error)) from None

    def drop_revoked(self) -> None:
        """Ends the connections of callers whose certificates hold no longer."""
        for who, shown, connection in list(self._under_way):
            try:
                self._certified(who, shown)
            except RefusedError as error:
                self.events.complain("refused", peer=who, reason=str(error))
                if self.door is not None:
                    self.door.drop(connection)

    async def _refuse(self, context: Any, who: str, code: grpc.StatusCode, reason: str) -> None:
        self.events.complain("refused", peer=who[:80] or "somebody", reason=reason)
        await context.abort(code, reason)
