"""The coordinator's lists of certificates that hold no longer, and what a member has seen of them.

A newer list may lack what an older one has, where the coordinator's folder was restored from a backup. What
was revoked once stays so: a member holds on to the lists that it has seen, and refuses a certificate in any
of them. ``revoked.json`` is the list that people put beside the certificates. ``revoked.seen.json`` holds all
that was seen in this folder, also from other members, one list a line; people do not write it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast_deploy.keys import Signature, load_key, sign, verify
from holdfast_deploy.storage.messages import Digest, parse

NAME, SEEN = "revoked.json", "revoked.seen.json"  # beside the certificates


class Revoked(BaseModel):
    """A certificate that holds no longer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(max_length=64)
    serial: str = Field(pattern="^[0-9A-F]{1,40}$")
    time: str = Field(max_length=40)
    reason: str = Field(default="", max_length=200)


class Revocations(BaseModel):
    """A list: all certificates that the coordinator knows to be revoked. ``number`` counts its lists."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    number: int = Field(default=0, ge=0)
    revoked: list[Revoked] = Field(default=[], max_length=10_000)


class SignedList(BaseModel):
    """The file: the list as text, and the coordinator's signature of that text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    document: str
    signature: Signature


class Heard(BaseModel):
    """What a member tells another: which lists it has, and one that the other lacks, if it knows of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    have: list[Digest] = Field(default=[], max_length=1000)
    lacking: SignedList | None = None


@dataclass(frozen=True)
class Known:
    """All certificates that were revoked in one of the ``signed`` lists."""

    signed: tuple[SignedList, ...] = ()  # the newest first; each revokes something that no newer one does
    contents: tuple[Revocations, ...] = ()  # what they say
    revoked: dict[str, Revoked] = field(default_factory=dict)  # by serial number

    @property
    def number(self) -> int:
        """Of the newest list."""
        return self.contents[0].number if self.contents else 0

    @property
    def left_out(self) -> str:
        """What the newest list lacks of the others, for people; "" if nothing."""
        newest = {entry.serial for entry in self.contents[0].revoked} if self.contents else set()
        lacking = [entry for serial, entry in self.revoked.items() if serial not in newest]
        if not lacking:
            return ""
        names = ", ".join(f"{entry.serial} of {entry.name}" for entry in lacking[:3])
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        return (
            f"version {self.number} lacks the certificate {names}{more}, which an earlier version revoked; "
            "what was revoked stays so. Was the coordinator's folder restored from a backup? With a member's "
            f"{SEEN} in it, the next list that it makes ('holdfast federation revoke') is whole"
        )

    def why(self, serial: str) -> str | None:
        """Why the certificate with this serial number holds no longer; None if it does."""
        if (entry := self.revoked.get(serial)) is None:
            return None
        reason = f": {entry.reason}" if entry.reason else ""
        return f"the certificate {serial} of {entry.name} was revoked on {entry.time}{reason}"

    def tell(self, have: Collection[str] | None = None) -> Heard:
        """What is said to a member that has the lists ``have``; None: that is not known yet."""
        ours = {_digest(one): one for one in self.signed}
        lacking = [] if have is None else [one for digest, one in ours.items() if digest not in have]
        return Heard(have=list(ours), lacking=next(iter(lacking), None))


def known_from(lists: Iterable[SignedList], coordinator: str | None) -> Known:
    """What ``lists`` say together, each signed with the key ``coordinator``."""
    read = {one.document: (_verified(one, coordinator), one) for one in lists}
    signed, contents, revoked = list[SignedList](), list[Revocations](), dict[str, Revoked]()
    for content, one in sorted(read.values(), key=lambda pair: (-pair[0].number, pair[1].document)):
        new = {entry.serial: entry for entry in content.revoked if entry.serial not in revoked}
        if new or not contents:
            signed.append(one)
            contents.append(content)
            revoked |= new
    return Known(tuple(signed), tuple(contents), revoked)


def _verified(signed: SignedList, coordinator: str | None) -> Revocations:
    if coordinator is None:
        raise HoldfastError("the federation file names no coordinator who could have signed it")
    verify("revocations", signed.document.encode(), signed.signature, trusted=coordinator)
    found: Revocations = parse(Revocations, signed.document.encode())
    return found


def _digest(signed: SignedList) -> str:
    return hashlib.sha256(signed.document.encode()).hexdigest()


def read_revocations(folder: Path, coordinator: str | None) -> Known:
    """What the lists in ``folder`` say together, each signed with the key ``coordinator``."""
    return known_from([*_read(folder / NAME, coordinator), *_read(folder / SEEN, coordinator)], coordinator)


def _read(path: Path, coordinator: str | None) -> list[SignedList]:
    """The lists in ``path``, one a line; none if there is no such file."""
    try:
        lists = [parse(SignedList, line) for line in path.read_bytes().splitlines()]
        known_from(lists, coordinator)
    except FileNotFoundError:
        return []
    except HoldfastError as error:
        raise HoldfastError(f"{path}: {error}") from None
    return lists


def keep_seen(folder: Path, known: Known, coordinator: str | None) -> None:
    """Writes ``known`` down in ``folder``, for good, beside what other processes have written there."""
    there = _read(folder / SEEN, coordinator)
    together = known_from([*there, *known.signed], coordinator)
    if list(together.signed) != there:
        text = "".join(one.model_dump_json() + "\n" for one in together.signed)
        write_atomic(folder / SEEN, text.encode())


def revoke(folder: Path, entry: Revoked, coordinator: str) -> Path:
    """A list of all that ``folder`` knows of, and ``entry``, signed with the coordinator's key; its path."""
    before = read_revocations(folder, coordinator)
    if before.why(entry.serial) is not None:
        raise HoldfastError(f"the certificate {entry.serial} of {entry.name} is revoked already")
    after = Revocations(number=before.number + 1, revoked=[*before.revoked.values(), entry])
    document = after.model_dump_json()
    signature = sign("revocations", document.encode(), load_key(folder))
    verify("revocations", document.encode(), signature, trusted=coordinator)
    write_atomic(folder / NAME, SignedList(document=document, signature=signature).model_dump_json().encode())
    return folder / NAME
