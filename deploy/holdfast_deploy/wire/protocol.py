"""What members say to one another, and the settings that both ends of a connection share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Protocol

import aiohttp
from aiohttp import web
from aiohttp.http import HttpProcessingError
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.links import KEPT, LinkDigest
from holdfast_deploy.storage.messages import (
    CHUNK,
    LONGEST_HEADER,
    Header,
    Incarnations,
    Number,
)

VERSION = "/v2"  # of the wire: every path begins with it
SYNC, LINKS, RELEASED = f"POST {VERSION}/sync", f"POST {VERSION}/links", f"POST {VERSION}/released"
REVOCATIONS, STATUS = f"POST {VERSION}/revocations", f"GET {VERSION}/status"
QUESTIONS = (SYNC, LINKS, RELEASED, REVOCATIONS, STATUS)  # that ``Service`` answers while it takes part
MEMBERSHIP = f"POST {VERSION}/membership"
MESSAGES = f"{VERSION}/messages"  # then /ROUND/EXCHANGE; GET fetches, PUT submits

# What stands beside a question, as headers of HTTP:
NAME_KEY = "holdfast-name"  # without certificates, on loopback only, members say who they are
MODEL_KEY = "holdfast-model"  # a member that trains a model of its own says which; see ``OwnModel.identity``
READING_KEY = "holdfast-reading"  # what the asker's columns are; see ``Readings.header``
AUDIT_KEY = "holdfast-audit"  # the asker's ``Head``, for the other's audit log

PATIENCE = 20.0  # seconds that a question is kept open before the answer is "not yet"
SILENCE = PATIENCE + 30.0  # seconds without a byte after which a request is given up
HANDSHAKE = 10.0  # seconds in which both ends have to prove who they are
AHEAD = 4 * CHUNK  # bytes that may wait to be sent: one end reads on while the other is busy
LARGEST_PIECE = CHUNK + (1 << 16)  # bytes of a piece that was compressed


Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Kind(Enum):
    """Why a question is refused, as a status of HTTP."""

    MALFORMED = 400
    NOT_ALLOWED = 403  # the caller may not ask this
    UNKNOWN = 404  # there is no such question
    TOO_SLOW = 408
    DISAGREE = 409  # about the federation file, the model, the columns: waiting alone does not mend it
    FOR_GOOD = 410  # the asker cannot continue in this run
    CHANGED = 412  # this is not the message any more that the asker was promised
    FORGED = 422  # see ``ForgedError``
    TOO_MUCH = 429  # at a time
    NOT_YET = 503  # it does not take part, or not in the same roster
    NO_ROOM = 507  # on disk, or a file that cannot be read: the asker tries again


class RefusedError(HoldfastError):
    """A question that is answered with an error."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class Peer:
    """Who asks, as its certificate says, and what it says beside its question."""

    name: str  # "": it has none
    address: str = ""
    certificate: bytes = b""  # PEM; b"": without certificates
    said: Mapping[str, str] = field(default_factory=dict)  # by ``MODEL_KEY`` and the like

    def says(self, key: str) -> str:
        """What stands beside the question under ``key``; "" if nothing."""
        return self.said.get(key, "")


@dataclass(frozen=True)
class Wanted:
    """The message of an exchange, from the byte ``offset`` on, if its content is still this one."""

    round: int
    exchange: int
    content: str
    offset: int = 0


@dataclass(frozen=True)
class Sending:
    """A message on its way to a peer."""

    size: int | None  # bytes of all ``pieces``; None: not known before they are compressed
    whole: int  # bytes of the message
    pieces: Iterator[bytes]


Pieces = AsyncIterator[bytes]


class Answerer(Protocol):
    """A member's answers to others. Each may raise a ``RefusedError``."""

    @property
    def answers(self) -> Mapping[str, Callable[[Peer, bytes], Awaitable[bytes]]]:
        """The questions with short answers, by method and path."""

    def message(self, peer: Peer, wanted: Wanted) -> AbstractAsyncContextManager[Sending]:
        """A message, for as long as it is being sent."""

    async def submit(self, peer: Peer, round: int, exchange: int, pieces: Pieces) -> bytes:
        """Takes a message, whose header comes first."""


async def pieces_of(content: aiohttp.StreamReader) -> Pieces:
    """The body of a request or of an answer, as it comes in; each piece within ``SILENCE``."""
    while True:
        try:
            async with asyncio.timeout(SILENCE):
                piece = await content.readany()  # not chunk by chunk: they may have a byte each
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise HoldfastError(f"not HTTP: {error}") from None
        if piece:
            yield piece
        elif content.at_eof():
            return


async def whole_body(content: aiohttp.StreamReader, most: int = LONGEST_HEADER) -> bytes:
    """All of a body, which must not have more than ``most`` bytes."""
    body = bytearray()
    async for piece in pieces_of(content):
        body += piece
        if len(body) > most:
            raise HoldfastError(f"more than {most} bytes")
    return bytes(body)


def audit_message(events: Events, event: str, header: Header, **who: str) -> None:
    """A line in the audit log about a message that passed; ``who``: peer, address, serial."""
    events.audit(
        event,
        **who,
        round=header.round,
        exchange=header.exchange,
        bytes=header.size,
        digest=header.checksum,
    )


class LeftOut(Exception):  # noqa: N818 - not an error
    """The server continued without this client's message of ``message_round``; it is at round ``now``."""

    def __init__(self, message_round: int, now: int) -> None:
        super().__init__(f"left out of round {message_round}")
        self.message_round, self.now = message_round, now


class Counted(Exception):  # noqa: N818 - not an error
    """The server has ended the round with this client's message, and needs nothing more of it."""


class Ask(BaseModel):
    """A question about one exchange."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    federation: str = Field(max_length=64)
    start: str = Field(max_length=64)  # digest of the model that the asker started from
    round: Number
    exchange: Number
    depends_on: Incarnations = {}  # what the asker's state depends on
    passed: list[LinkDigest] = Field(default=[], max_length=KEPT)  # over the link, as the asker saw it


class Answer(BaseModel):
    """What a question about an exchange is answered."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    round: Number  # where the one who answers is
    header: Header | None = None  # of the message, which can be fetched now; None: not yet
    # Whether a sporadic link took part; None: not decided yet. Of a server, False: see ``LeftOut``,
    # and True, without a header: see ``Counted``.
    active: bool | None = None
    received: bool = False  # a message to the server is safe there
    passed: list[LinkDigest] = Field(default=[], max_length=KEPT)  # as the one who answers saw it
