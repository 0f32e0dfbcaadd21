"""The coordinator's list of certificates that hold no longer, and how a running member gets to know of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic
from holdfast.engines.deploy.signing import Signature, load_key, sign, verify
from holdfast.engines.deploy.storage.messages import parse

NAME = "revoked.json"  # beside the certificates


class Revoked(BaseModel):
    """A certificate that holds no longer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = Field(max_length=64)
    serial: str = Field(pattern="^[0-9A-F]{1,40}$")
    time: str = Field(max_length=40)
    reason: str = Field(default="", max_length=200)


class Revocations(BaseModel):
    """All certificates that were revoked. A list never gets shorter; ``number`` counts its versions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    number: int = Field(default=0, ge=0)
    revoked: list[Revoked] = Field(default=[], max_length=10_000)

    def why(self, serial: str) -> str | None:
        """Why the certificate with this serial number holds no longer; None if it does."""
        for entry in self.revoked:
            if entry.serial == serial:
                reason = f": {entry.reason}" if entry.reason else ""
                return f"the certificate {serial} of {entry.name} was revoked on {entry.time}{reason}"
        return None


class SignedList(BaseModel):
    """The file: the list as text, and the coordinator's signature of that text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    document: str
    signature: Signature


class Heard(BaseModel):
    """Which version of the list a member has, and the list itself for one who has an older one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    number: int = Field(ge=0)
    newer: SignedList | None = None


def read_revocations(folder: Path, coordinator: str | None) -> Revocations:
    """The list in ``folder``, if there is one, signed with the key ``coordinator``."""
    path = folder / NAME
    if not path.exists():
        return Revocations()
    try:
        return _verified(parse(SignedList, path.read_bytes()), coordinator)
    except HoldfastError as error:
        raise HoldfastError(f"{path}: {error}") from None


def _verified(signed: SignedList, coordinator: str | None) -> Revocations:
    if coordinator is None:
        raise HoldfastError("the federation file names no coordinator who could have signed it")
    verify("revocations", signed.document.encode(), signed.signature, trusted=coordinator)
    found: Revocations = parse(Revocations, signed.document.encode())
    return found


def list_for(folder: Path | None, number: int, theirs: int) -> Heard:
    """What one is told who has version ``theirs``, by one who has ``number``, in ``folder``."""
    newer = None
    if folder is not None and number > theirs:
        newer = parse(SignedList, (folder / NAME).read_bytes())
    return Heard(number=number, newer=newer)


def take_over(folder: Path | None, number: int, heard: Heard, coordinator: str | None) -> bool:
    """Writes down a list if it is newer than the one of version ``number`` in ``folder``; whether it is."""
    if folder is None or heard.newer is None or _verified(heard.newer, coordinator).number <= number:
        return False
    write_atomic(folder / NAME, heard.newer.model_dump_json().encode())
    return True


def revoke(folder: Path, entry: Revoked, coordinator: str) -> Path:
    """Adds a certificate to the list in ``folder``, signed with the coordinator's key there; its path."""
    before = read_revocations(folder, coordinator)
    if before.why(entry.serial) is not None:
        raise HoldfastError(f"the certificate {entry.serial} of {entry.name} is revoked already")
    after = Revocations(number=before.number + 1, revoked=[*before.revoked, entry])
    document = after.model_dump_json()
    signature = sign("revocations", document.encode(), load_key(folder))
    verify("revocations", document.encode(), signature, trusted=coordinator)
    write_atomic(folder / NAME, SignedList(document=document, signature=signature).model_dump_json().encode())
    return folder / NAME
