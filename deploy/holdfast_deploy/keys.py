"""Private keys in files, which may be encrypted, and what the coordinator signs with its own.

The key ``coordinator.key`` stays with the coordinator. Its public half travels in every signature. Members
trust it because they compared its fingerprint when they accepted the federation file.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import BaseModel, ConfigDict, Field

from holdfast.core.errors import HoldfastError

VARIABLE, FILE_VARIABLE = "HOLDFAST_PASSPHRASE", "HOLDFAST_PASSPHRASE_FILE"  # of the environment
KEY_NAME = "coordinator.key"

# A signature for one purpose is none for another.
Purpose = Literal["federation", "membership", "revocations"]


# --- private keys in files ----------------------------------------------------------------------------------


@cache  # nobody is asked twice, when files are read again
def passphrase(path: Path) -> bytes:
    """For the key in ``path``: from the environment, from a file that it names, or asked for."""
    if given := os.environ.get(VARIABLE):
        return given.encode()
    if named := os.environ.get(FILE_VARIABLE):
        try:
            return Path(named).read_bytes().rstrip(b"\r\n")
        except OSError as error:
            raise HoldfastError(f"{FILE_VARIABLE}: {named} cannot be read ({error.strerror})") from None
    if sys.stdin is not None and sys.stdin.isatty():
        return getpass.getpass(f"passphrase of {path}: ").encode()
    raise HoldfastError(
        f"{path} is encrypted: put its passphrase into a file that {FILE_VARIABLE} names, or into {VARIABLE}"
    )


def read_private_key(path: Path) -> PrivateKeyTypes:
    """The private key in ``path``, decrypted if need be."""
    content = path.read_bytes()
    try:
        try:
            return load_pem_private_key(content, password=None)
        except TypeError:  # it is encrypted
            return load_pem_private_key(content, password=passphrase(path))
    except HoldfastError:
        raise
    except (ValueError, TypeError):
        hint = ", or its passphrase is another one" if b"ENCRYPTED" in content else ""
        raise HoldfastError(f"{path} is not a private key in PEM format{hint}") from None


def write_private_key(path: Path, key: PrivateKeyTypes, *, encrypt: bool = False) -> None:
    """Writes ``key`` to a new file that its owner alone can read."""
    protection: KeySerializationEncryption = NoEncryption()
    if encrypt:
        protection = BestAvailableEncryption(passphrase(path))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)


# --- the coordinator's key ----------------------------------------------------------------------------------


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

    ``trusted`` is a public key in hexadecimal digits; None: any key, the one in the signature.
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
    """Of a public key in hexadecimal digits, as people compare it: 16 groups of four digits."""
    return hashlib.sha256(bytes.fromhex(key)).digest().hex(":", 2)


def _signed(purpose: Purpose, document: bytes) -> bytes:
    return b"holdfast " + purpose.encode() + b"\0" + document
