"""Private keys in files, which may be encrypted; their passphrase comes from outside the files."""

from __future__ import annotations

import getpass
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from holdfast.core.errors import HoldfastError

VARIABLE, FILE_VARIABLE = "HOLDFAST_PASSPHRASE", "HOLDFAST_PASSPHRASE_FILE"


@cache  # who was asked is not asked again when files are read anew
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


def read_private_key(path: Path) -> Any:
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


def write_private_key(path: Path, key: Any, *, encrypt: bool = False) -> None:
    """Writes ``key`` to a new file that its owner alone can read."""
    protection: KeySerializationEncryption = NoEncryption()
    if encrypt:
        protection = BestAvailableEncryption(passphrase(path))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(pem)
