"""What travels between a member and the relay: where it goes in the clear, what it says sealed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError

RELAY_SERVICE = "holdfast.Relay"
ANSWERS, LAST, CANCELS, GONE = 1, 2, 4, 8  # flags of a parcel

_PARCEL = struct.Struct(">BIQH")  # flags, call, frame, length of the card
_ORIGIN = struct.Struct(">B32s")  # length of the sender's name, its process

Name = Annotated[str, Field(max_length=64)]
Scope = Annotated[str, Field(pattern="^[0-9a-z-]{1,64}$")]  # see ``Switchboard``
Instance = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # of a process: see ``Card.instance``


class Hello(BaseModel):
    """A process wants to be sent what comes for it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    instance: Instance
    scope: Scope
    card: str = Field(default="", max_length=16384)  # who answers questions shows it; "": it only asks


class Address(BaseModel):
    """To whom all that follows goes, and from which process it comes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    to: Name
    instance: Instance
    sender: Instance


class CardAsk(BaseModel):
    """Whose card is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    of: Name
    scope: Scope


@dataclass(frozen=True)
class Parcel:
    """One frame of a question or of an answer."""

    call: int
    frame: int
    sealed: bytes
    answers: bool = False
    last: bool = False
    cancels: bool = False  # the asker wants no more of the answer
    gone: bool = False  # the relay's own word: the process that this seems to come from has ended
    card: bytes = b""  # of the asker, with the first frame of a question

    def pack(self) -> bytes:
        flags = ANSWERS * self.answers | LAST * self.last | CANCELS * self.cancels | GONE * self.gone
        return _PARCEL.pack(flags, self.call, self.frame, len(self.card)) + self.card + self.sealed

    @classmethod
    def unpack(cls, content: bytes) -> Parcel:
        try:
            flags, call, frame, length = _PARCEL.unpack_from(content)
        except struct.error:
            raise HoldfastError("a parcel is too short") from None
        start = _PARCEL.size + length
        answers, last, cancels, gone = (bool(flags & bit) for bit in (ANSWERS, LAST, CANCELS, GONE))
        card = content[_PARCEL.size : start]
        return cls(call, frame, content[start:], answers, last, cancels, gone, card)


def stamp(sender: str, instance: str, parcel: bytes) -> bytes:
    """What the relay hands on: the parcel, and from whom it has it."""
    return _ORIGIN.pack(len(sender), instance.encode()) + sender.encode() + parcel


def unstamp(content: bytes) -> tuple[str, str, bytes]:
    """(sender, instance, parcel)"""
    try:
        length, instance = _ORIGIN.unpack_from(content)
        start = _ORIGIN.size + length
        return content[_ORIGIN.size : start].decode(), instance.decode(), content[start:]
    except (struct.error, UnicodeDecodeError):
        raise HoldfastError("the relay sent something that is no parcel") from None
