"""What members say to one another, and the settings that both ends of a connection share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.links import KEPT, LinkDigest
from holdfast_deploy.storage.messages import (
    CHUNK,
    UNSEALED,
    Digest,
    Header,
    Incarnations,
    Number,
)

SERVICE = "holdfast.Federation"
NAME_KEY = "holdfast-name"  # without certificates, on loopback only, members say who they are
MODEL_KEY = "holdfast-model"  # who trains a model of its own says which; see ``OwnModel.identity``
READING_KEY = "holdfast-reading"  # what the asker's columns are; see ``Readings.header``
AUDIT_KEY = "holdfast-audit"  # the asker's ``Head``, for the other's audit log
PATIENCE = 20.0  # seconds that a question is kept open before the answer is "not yet"
SILENCE = PATIENCE + 30.0  # seconds without a frame after which a call is given up
LARGEST_FRAME = CHUNK + (1 << 16)

CONNECTION = [
    ("grpc.max_receive_message_length", LARGEST_FRAME),
    ("grpc.max_send_message_length", LARGEST_FRAME),
    ("grpc.max_metadata_size", 16384),
    ("grpc.keepalive_time_ms", 30_000),  # a long local phase is no reason to drop a connection
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),  # two processes on one port is a mistake
]


Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Kind(Enum):
    """Why a question is refused, as a status of HTTP."""

    MALFORMED = 400
    NOT_ALLOWED = 403  # the caller may not ask this
    UNKNOWN = 404  # there is no such question
    TOO_SLOW = 408
    DISAGREE = 409  # about the federation file, the model, the columns: waiting alone does not mend it
    FOR_GOOD = 410  # the asker cannot continue in this run
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
    said: Mapping[str, str] = field(default_factory=dict)  # by ``MODEL_KEY`` and the like; "" if nothing

    def says(self, key: str) -> str:
        """What stands beside the question under ``key``; "" if nothing."""
        return self.said.get(key, "")


Pieces = AsyncIterator[bytes]


async def take_first(pieces: Pieces) -> bytes:
    """The first piece, which says what is wanted, or what follows."""
    async with asyncio.timeout(SILENCE):
        async for piece in pieces:
            return piece
    raise HoldfastError(f"nothing, or a frame above {LARGEST_FRAME} bytes")


class Answerer(Protocol):
    """A member's answers to others. Each may raise a ``RefusedError``."""

    @property
    def answers(self) -> Mapping[str, Callable[[Peer, bytes], Awaitable[bytes]]]:
        """The questions with short answers, by name."""

    def fetch(self, peer: Peer, body: bytes) -> AsyncGenerator[bytes, None]:
        """The message of an exchange, in pieces."""

    async def submit(self, peer: Peer, pieces: Pieces) -> bytes:
        """Takes a message, in pieces."""


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
    offset: Bytes = 0  # how much of the message is there from before, whole pieces
    content: Digest = UNSEALED  # of the message that this is a part of


class Answer(BaseModel):
    """What comes first in every answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    round: Number  # where the one who answers is
    header: Header | None = None  # of the message that follows; None: not yet
    offset: Bytes = 0  # from where on it follows
    # Whether a sporadic link took part; None: not decided yet. Of a server, False: see ``LeftOut``,
    # and True, without a header: see ``Counted``.
    active: bool | None = None
    received: bool = False  # a message to the server is safe there
    passed: list[LinkDigest] = Field(default=[], max_length=KEPT)  # as the one who answers saw it
