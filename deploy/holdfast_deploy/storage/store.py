"""A member's directory: all that it needs to come back after a crash as if nothing had happened.

``state`` is the member's state after its last finished round, ``state.previous`` the one before. ``outbox``
holds messages since, each written before any member can fetch it, until all that are to have it have moved
on. ``inbox`` holds what came in for the last finished round and for the one under way. From it and from
``state.previous`` the last finished round can be computed again if ``state`` or a message of it is damaged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.core.errors import DAMAGED, HoldfastError
from holdfast.core.files import (
    make_folder,
    remove_partials,
    replace_durably,
    sync_folder,
    write_atomic,
    write_json,
)
from holdfast_deploy.ops.events import Events
from holdfast_deploy.storage.links import START_ANEW, new_incarnation
from holdfast_deploy.storage.messages import (
    BeyondRepairError,
    DamagedError,
    Header,
    Incarnations,
    MessageFile,
    specs,
    write_partial,
)


class FolderGoneError(HoldfastError):
    """The folder that a running member writes to is not there any more, or another one is in its place."""

    exit_code = DAMAGED


DECISIONS = {b"active\n": True, b"inactive\n": False}  # no flipped bit makes one of the other


class Store:
    """The directory of one member of one federation."""

    def __init__(self, folder: Path, identity: dict[str, str], events: Events, first: int = 0) -> None:
        self.folder, self.identity, self.events = folder, identity, events
        self.first = first  # rounds that were done before it was begun
        self.state, self.previous = folder / "state", folder / "state.previous"
        self._newest: int | None = None  # the round of ``state``, if that is known to be intact
        self.again = 0  # rounds that were finished, and are computed again because a file was damaged
        self.outbox, self.inbox, self.decisions = (folder / n for n in ("outbox", "inbox", "decisions"))
        make_folder(folder)
        for part in (self.outbox, self.inbox, self.decisions):
            part.mkdir(exist_ok=True)
        self._lock = (folder / "lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HoldfastError(f"{folder} is in use by another process; stop that one first") from None
        self.incarnation = self._check_identity()
        remove_partials(folder)
        # A process that was killed may have left names that are not durable, and others will hear of them.
        for part in (folder, self.outbox, self.inbox, self.decisions):
            sync_folder(part)

    def close(self) -> None:
        self._lock.close()

    def require_folder(self) -> None:
        """Complains if the folder is not the one any more that this process has begun with."""
        with suppress(OSError):
            if os.path.samestat(os.stat(self.folder / "lock"), os.fstat(self._lock.fileno())):
                return
        raise FolderGoneError(
            f"{self.folder} was taken away, or replaced, while {self.identity['name']} ran: put it back as "
            "it was, and start the same command again. If it is lost: where members may change "
            "([membership]), start with an empty one, and have the coordinator run 'holdfast federation "
            f"replace'; else {START_ANEW}"
        )

    def _check_identity(self) -> str:
        """What is here must have been begun with the same federation, data and model; the incarnation."""
        path = self.folder / "identity.json"
        try:
            begun = read_identity(path)
        except DamagedError as error:
            begun = self.identity | {"incarnation": self._known_incarnation(path, error)}
            write_identity(path, begun)
        for key, now in self.identity.items():
            if begun.get(key) != now:
                raise HoldfastError(
                    f"{self.folder} was begun with another {key}; go on with that one, or choose a new --dir"
                )
        return begun["incarnation"]

    def _known_incarnation(self, path: Path, damage: DamagedError) -> str:
        """Where ``path`` is missing or damaged: the incarnation, which stands in all that was written."""
        written = [self.state, self.previous, *_whole(self.outbox)]
        there = [file for file in written if file.exists()]
        for file in there:
            try:
                message = MessageFile(file)
                message.verify()
            except DamagedError:
                continue
            header = message.header
            mine = (self.identity["federation file"], self.identity["name"])
            if (header.federation, header.sender) == mine and mine[1] in header.depends_on:
                self.events.log("a file is written anew", "warning", reason=str(damage))
                return header.depends_on[mine[1]]
        if there or path.exists():
            raise BeyondRepairError(f"{damage}, and so is all that it could be made from; {self._way_out()}")
        return new_incarnation()

    def _way_out(self) -> str:
        """What people can do if this folder is beyond repair."""
        kept = self.folder / "snapshots"
        rounds = sorted(int(path.name) for path in kept.glob("*") if path.name.isdigit())
        if rounds:
            return (
                f"put everybody back to round {rounds[-1]} with 'holdfast federation rollback --to "
                f"{rounds[-1]}', each at its own site; or {START_ANEW}"
            )
        return f"put this folder back as it was, or {START_ANEW}"

    def own(self, path: Path, sender: str, key: tuple[int, int] | None = None) -> MessageFile:
        """A file of this directory, checked: intact, of this run, by ``sender``, and what its name says.

        A damaged file is a ``DamagedError``. A file that belongs elsewhere is another error: only the people
        who put it there can tell what is right.
        """
        message = MessageFile(path)
        message.verify()
        header = message.header
        checks: list[tuple[str, object, object]] = [
            ("federation file", header.federation, self.identity["federation file"]),
            ("member", header.sender, sender),
        ]
        if key is not None:
            checks += [("round", header.round, key[0]), ("exchange", header.exchange, key[1])]
        if sender == self.identity["name"]:
            checks.append(("run", header.depends_on.get(sender), self.incarnation))
        for what, got, expected in checks:
            if got != expected:
                raise HoldfastError(
                    f"{path} is of another {what}: expected {expected}, got {got}; put back the file that "
                    f"was there, or {START_ANEW}"
                )
        return message

    # --- state -----------------------------------------------------------------------------------------

    def save_state(self, done: int, state: Any, notes: dict[str, Any], depends_on: Incarnations) -> None:
        """The state after ``done`` rounds; the one before is kept, the one before that is not."""
        header = Header(
            federation=self.identity["federation file"],
            sender=self.identity["name"],
            round=done,
            exchange=0,
            tensors=specs(state),
            depends_on=depends_on,
            notes=notes,
        )
        temporary, _ = write_partial(self.state, header, state)
        if self._newest is not None and self._newest < done:  # a damaged one must not replace a good one
            self.state.replace(self.previous)
            self._newest = None  # a second attempt, after there was no room, leaves it there
        replace_durably(temporary, self.state)
        self._newest = done

    def saved_state(self, lost: Collection[int] = ()) -> MessageFile | None:
        """The state to continue from, None if that is the very beginning.

        That is the newest one. It is the one before if the newest is damaged, or if its round is among the
        ``lost`` ones, of which a message is to be computed again.
        """
        newest, self.again = self._intact(self.state), 0
        self._newest = newest.header.round if newest is not None else None
        if newest is not None and newest.header.round not in lost:
            return newest
        before = self._intact(self.previous)
        if before is not None:
            if self.state.exists():
                self.events.log("a round is computed again", "warning", round=before.header.round + 1)
            self.again = 1  # also if ``state`` is gone: by a crash while it was replaced, or by somebody
            return before
        if self._at_the_beginning():
            return None
        if newest is None:
            raise BeyondRepairError(
                f"neither {self.state} nor {self.previous.name} is intact: {self._way_out()}"
            )
        return newest  # whoever still needs what is lost will be told that it is gone

    def state_before(self) -> MessageFile:
        """The state before the newest one."""
        before = self._intact(self.previous)
        if before is None:
            raise BeyondRepairError(f"{self.previous} is missing or damaged: {START_ANEW}")
        return before

    def _intact(self, path: Path) -> MessageFile | None:
        try:
            return self.own(path, self.identity["name"]) if path.exists() else None
        except DamagedError as error:
            self.events.complain("a file is damaged", reason=str(error))
            return None

    def _at_the_beginning(self) -> bool:
        """Whether nothing here can be later than the first round."""
        return all(
            message_key(path.name)[0] <= self.first + 1 for path in [*self.outbox.iterdir(), *self.received()]
        )

    def received(self) -> list[Path]:
        """The messages in the inbox, without those that are still coming in."""
        return _whole(self.inbox)

    # --- decisions --------------------------------------------------------------------------------------

    def decide(self, round: int, exchange: int, peer: str, active: bool) -> None:
        """Writes down, for good, whether the message of ``peer`` counts.

        Over sporadic links: whether the link took part. At a server with a quorum: False, ``peer`` is left
        out of the round. In the last message round: True, ``peer`` has finished.
        """
        content = next(text for text, value in DECISIONS.items() if value == active)
        write_atomic(self._decision(round, exchange, peer), content)

    def decision(self, round: int, exchange: int, peer: str) -> bool | None:
        """What was decided, None if nothing yet."""
        path = self._decision(round, exchange, peer)
        if not path.exists():
            return None
        content = path.read_bytes()
        if content not in DECISIONS:
            raise BeyondRepairError(f"{path} is damaged: {START_ANEW}")
        return DECISIONS[content]

    def _decision(self, round: int, exchange: int, peer: str) -> Path:
        return self.decisions / message_name(round, exchange, peer)

    def decided(self) -> list[tuple[int, int, str]]:
        """(round, exchange, peer) of all decisions that are kept."""
        return [message_key(path.name) for path in _whole(self.decisions)]

    def forget_decision(self, round: int, exchange: int, peer: str) -> None:
        """Drops a decision that nobody will ask for again."""
        remove(self._decision(round, exchange, peer))


def _whole(folder: Path) -> list[Path]:
    """The files in ``folder``, without those that another thread is still writing."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def message_name(round: int, exchange: int, member: str = "") -> str:
    """The file of a message to or from ``member``, or to all."""
    return f"{round}-{exchange}" + (f"-{member}" if member else "")


def message_key(name: str) -> tuple[int, int, str]:
    """(round, exchange, member) of ``message_name``."""
    match = re.fullmatch(r"(\d+)-(\d+)(?:-(.+))?", name)
    if match is None:
        raise HoldfastError(f"a file named {name!r} is not of this federation; take it out of the folder")
    return int(match[1]), int(match[2]), match[3] or ""


def clear(folder: Path) -> None:
    """Removes all that a store continues from; what is left for people stays."""
    for name in ("state", "state.previous"):
        remove(folder / name)
    for name in ("outbox", "inbox", "decisions", "models"):
        shutil.rmtree(folder / name, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a file that may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def data_digest(tensors: Iterable[Tensor]) -> str:
    """A short digest of a node's data or model, so that a run is not resumed with others."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            total.update(np.ascontiguousarray(tensor.cpu().numpy()).reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:16]


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
