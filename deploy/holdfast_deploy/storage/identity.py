"""The file ``identity.json``: what a member's folder was begun with, and has to be gone on with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from holdfast.core.files import write_json
from holdfast_deploy.storage.messages import DamagedError


def write_identity(path: Path, begun: dict[str, str]) -> None:
    """``begun``: federation, name, model, data and the incarnation, each as text."""
    write_json(path, begun | {"checksum": _checksum(begun)})


def read_identity(path: Path) -> dict[str, str]:
    """What was written there; a ``DamagedError`` if it is not there any more."""
    try:
        begun: dict[str, str] = json.loads(path.read_text())
        if begun.pop("checksum") != _checksum(begun):
            raise ValueError("changed")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{path} is missing or damaged") from None
    return begun


def _checksum(begun: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()
