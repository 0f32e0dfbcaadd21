"""A member's directory: all that it needs to come back after a crash as if nothing had happened.

``state`` is the member's state after its last finished round. ``outbox`` holds messages since, each written
before anybody can fetch it, until everybody who is to have it has moved on. ``inbox`` holds what came in:
scratch at a node, at a server the clients' messages of the round.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.files import write_atomic, write_json
from holdfast.engines.deploy.messages import Header, MessageFile, specs, write_message


class Store:
    """The directory of one member of one federation."""

    def __init__(self, folder: Path, identity: dict[str, str]) -> None:
        self.folder, self.identity = folder, identity
        self.outbox, self.inbox, self.decisions = (folder / n for n in ("outbox", "inbox", "decisions"))
        for part in (self.outbox, self.inbox, self.decisions):
            part.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HoldfastError(f"{folder} is in use by another process; stop that one first") from None
        self._check_identity()
        for partial in folder.glob("**/.*.partial"):
            partial.unlink()

    def close(self) -> None:
        self._lock.close()

    def _check_identity(self) -> None:
        """What is here must have been begun with the same federation, data and model."""
        path = self.folder / "identity.json"
        if not path.exists():
            write_json(path, self.identity)
            return
        begun: dict[str, str] = json.loads(path.read_text())
        for key, now in self.identity.items():
            if begun.get(key) != now:
                raise HoldfastError(
                    f"{self.folder} was begun with another {key}; go on with that one, or choose a new --dir"
                )

    # --- state -----------------------------------------------------------------------------------------

    def save_state(self, done: int, state: Any, notes: dict[str, Any]) -> None:
        """The state after ``done`` rounds; replaces the one before."""
        header = Header(
            federation=self.identity["federation file"],
            sender=self.identity["name"],
            round=done,
            exchange=0,
            tensors=specs(state),
            checksum=0,
            notes=notes,
        )
        write_message(self.folder / "state", header, state)

    def saved_state(self) -> MessageFile | None:
        """The last state, if there is one."""
        path = self.folder / "state"
        if not path.exists():
            return None
        saved = MessageFile(path)
        saved.verify()
        return saved

    # --- decisions about sporadic links ------------------------------------------------------------------

    def decide(self, round: int, exchange: int, peer: str, active: bool) -> None:
        """Writes down, for good, whether the link to ``peer`` took part."""
        write_atomic(self._decision(round, exchange, peer), b"1" if active else b"0")

    def decision(self, round: int, exchange: int, peer: str) -> bool | None:
        """What was decided, None if nothing yet."""
        path = self._decision(round, exchange, peer)
        return path.read_bytes() == b"1" if path.exists() else None

    def _decision(self, round: int, exchange: int, peer: str) -> Path:
        return self.decisions / message_name(round, exchange, peer)

    def decided(self) -> list[tuple[int, int, str]]:
        """(round, exchange, peer) of all decisions that are kept."""
        return [message_key(path.name) for path in self.decisions.iterdir()]

    def forget_decision(self, round: int, exchange: int, peer: str) -> None:
        """Drops a decision that nobody will ask for again."""
        remove(self._decision(round, exchange, peer))


def message_name(round: int, exchange: int, member: str = "") -> str:
    """The file of a message to or from ``member``, or to everybody."""
    return f"{round}-{exchange}" + (f"-{member}" if member else "")


def message_key(name: str) -> tuple[int, int, str]:
    """(round, exchange, member) of ``message_name``."""
    match = re.fullmatch(r"(\d+)-(\d+)(?:-(.+))?", name)
    if match is None:
        raise HoldfastError(f"a file named {name!r} is not of this federation; take it out of the folder")
    return int(match[1]), int(match[2]), match[3] or ""


def remove(path: Path) -> None:
    """Deletes a file that may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
