"""The coordinator's word: documents that are signed with its Ed25519 key, and what members check of them.

The key ``coordinator.key`` stays with the coordinator. Its public half travels in every signature. Members
trust it because they compared its fingerprint when they accepted the federation file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError
from holdfast_deploy.passphrase import read_private_key, write_private_key

KEY_NAME = "coordinator.key"

# A signature for one purpose is none for another.
Purpose = Literal["federation", "membership", "revocations"]


class Signature(BaseModel):
    """Who signed a document, and the signature; both in hexadecimal digits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    key: str = Field(pattern="^[0-9a-f]{64}$")  # the coordinator's public key
    signature: str = Field(pattern="^[0-9a-f]{128}$")


def make_key(folder: Path) -> Ed25519PrivateKey:
    """The key ``coordinator.key`` in ``folder``; made if it is not there."""
    path = folder / KEY_NAME
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_private_key(path, Ed25519PrivateKey.generate())
    return load_key(folder)


def load_key(folder: Path) -> Ed25519PrivateKey:
    """The key ``coordinator.key`` in ``folder``."""
    path = folder / KEY_NAME
    try:
        key = read_private_key(path)
    except OSError as error:
        raise HoldfastError(
            f"{path} cannot be read ({error.strerror}): only the coordinator can sign; see --certs"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise HoldfastError(f"{path}: expected an Ed25519 key; 'holdfast federation new' makes it")
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    """The public half of ``key``, in hexadecimal digits."""
    return key.public_key().public_bytes_raw().hex()


def sign(purpose: Purpose, document: bytes, key: Ed25519PrivateKey) -> Signature:
    """The coordinator's signature of ``document``."""
    signature = key.sign(_signed(purpose, document))
    return Signature(key=public_key(key), signature=signature.hex())


def verify(purpose: Purpose, document: bytes, signature: Signature, trusted: str | None = None) -> None:
    """Refuses ``document`` unless ``signature`` is of it, for this purpose, and by the key ``trusted``.

    ``trusted`` is a public key in hexadecimal digits; None: by the key in the signature, whoever has it.
    """
    if trusted is not None and signature.key != trusted:
        raise HoldfastError(
            f"signed with another key than the coordinator's: {fingerprint(signature.key)}, "
            f"not {fingerprint(trusted)}"
        )
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key))
    try:
        key.verify(bytes.fromhex(signature.signature), _signed(purpose, document))
    except InvalidSignature:
        raise HoldfastError(
            "the signature is not of this document: one of them was changed; ask the coordinator for both"
        ) from None


def fingerprint(key: str) -> str:
    """Of a public key in hexadecimal digits, for people to compare: 16 groups of four digits."""
    return hashlib.sha256(bytes.fromhex(key)).digest().hex(":", 2)


def _signed(purpose: Purpose, document: bytes) -> bytes:
    return b"holdfast " + purpose.encode() + b"\0" + document
