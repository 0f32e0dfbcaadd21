"""What a member tells others about itself. It is their word: checked before anybody looks at it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from holdfast.core.errors import HoldfastError, printable
from holdfast.core.validation import NonNegative, explain, place
from holdfast_deploy.federation import Federation, NodeMetric
from holdfast_deploy.storage.messages import Number

LONGEST_ANSWER = 1 << 20  # bytes
LONGEST_TEXT = 1000  # characters of a text that are shown


def _shown(text: str) -> str:
    return printable(text[:LONGEST_TEXT]) + (" ..." if len(text) > LONGEST_TEXT else "")


Words = Annotated[str, AfterValidator(_shown)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class ClientSeen(BaseModel):
    """Where a server last saw one of its clients."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    round: Number
    seconds_ago: NonNegative


class MessageSeen(BaseModel):
    """The last message of a member that another has seen."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    round: Number
    norm: NonNegative


class StatusAnswer(BaseModel):
    """``Session.status`` as others receive it. What is not listed here is not looked at."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    name: Words
    federation: Words
    roster: Number = 0
    round: Number
    rounds: Number
    phase: Words
    payload_bytes: Bytes
    wire_bytes_sent: Bytes
    wire_bytes_received: Bytes
    retries: Bytes
    waiting_seconds: NonNegative
    uptime_seconds: NonNegative
    refused: dict[Words, Bytes] = Field(max_length=100)
    last_error: Words
    messages: dict[Words, MessageSeen] = Field(default={}, max_length=10_000)
    metrics: dict[NodeMetric, float]
    certificate_days: float | None = None  # until it expires
    epsilon: NonNegative | None = None  # spent of a privacy budget
    clients: dict[Words, ClientSeen] | None = None  # of a server


def read_status(text: bytes, peer: str, federation: Federation) -> dict[str, Any]:
    """What ``peer`` says about itself; a ``HoldfastError`` if that cannot be."""
    if len(text) > LONGEST_ANSWER:
        raise HoldfastError(f"{len(text)} bytes are too long")
    try:
        answer = StatusAnswer.model_validate_json(text)
    except ValidationError as error:
        where = place(error.errors()[0]["loc"])
        raise HoldfastError(f"{where + ': ' if where else ''}{explain(error)}") from None
    if answer.name != peer:
        raise HoldfastError(f"it is {peer}'s address, and the answer is of {answer.name!r}")
    for round in (answer.round, *(client.round for client in (answer.clients or {}).values())):
        if round > federation.rounds:
            raise HoldfastError(f"round: there is no {round}")
    return answer.model_dump(exclude_unset=True)
