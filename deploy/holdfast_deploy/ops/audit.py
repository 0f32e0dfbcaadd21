"""A member's audit log: what was sent to whom, and received from whom, as lines that depend on all before.

``audit.jsonl`` is only ever appended to. Each line holds the SHA-256 of the line before it, so that no line
can be changed, taken out or put in without all later ones showing it. The saved state holds the number and
the hash of the last line, and so do the logs of neighbours, who receive them with each question: they show
that lines are missing at the end. Only lines that survive a power cut are reported in this way, and no
message leaves before its own line does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import DAMAGED, HoldfastError
from holdfast.core.files import sync_folder

NAME = "audit.jsonl"
BEGINNING = "0" * 64
LONGEST_LINE = 1 << 16  # bytes
MOST_UNSYNCED = 1 << 15  # bytes of lines that no message waits for
TAIL = 2 * LONGEST_LINE  # bytes at the end, which hold all that was not synced
KINDS = {"time": str, "event": str, "member": str, "peer": str, "digest": str, "head": str, "bytes": int}


class Head(NamedTuple):
    """The last line of a log: how many lines there are, and its hash."""

    lines: int
    hash: str

    def __str__(self) -> str:
        return f"{self.lines}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> Head | None:
        """The head that ``str`` wrote; None if ``text`` is something else."""
        found = re.fullmatch(r"(\d{1,15}):([0-9a-f]{64})", text)
        return None if found is None else cls(int(found[1]), found[2])


class AuditError(HoldfastError):
    """An audit log is not as it was written."""

    exit_code = DAMAGED


class AuditLog:
    """The log in ``folder``, to be appended to. Any thread may write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._lock, self._syncing = threading.Lock(), threading.Lock()
        self._pending: list[bytes] = []  # while there is no room
        self._unsynced = 0  # bytes, about
        torn = self._repair()
        self.head = self._last()
        sync_folder(folder)  # the file itself, which may be new
        os.fdatasync(self._file)  # a process that was killed may have left more than was synced
        self.durable = self.head  # as far as all survives a power cut
        if torn:  # a power cut
            self.note("repaired", torn_bytes=torn)

    def _repair(self) -> int:
        """Cuts off what a power cut has left of lines that were not synced; returns how many bytes.

        That is a last line without its end, and all lines from the first with a hole: zeros, which no line
        has, stand where only bytes that were appended later had reached the disk.
        """
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, TAIL, max(size - TAIL, 0))
        hole = tail.find(b"\0")
        torn = len(tail) - (tail.rfind(b"\n", 0, None if hole < 0 else hole) + 1)
        if torn:
            os.ftruncate(self._file, size - torn)
        return torn

    def _last(self) -> Head:
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, LONGEST_LINE, max(size - LONGEST_LINE, 0))
        if not tail:
            return Head(0, BEGINNING)
        line = tail.rstrip(b"\n").rpartition(b"\n")[2]
        try:
            return Head(int(json.loads(line)["n"]) + 1, _hash(line))
        except (ValueError, KeyError, TypeError):
            raise AuditError(f"{self.path} is damaged: 'holdfast federation audit' says where") from None

    def holds(self, head: Head) -> bool:
        """Whether this log had ``head`` once, and has only grown since."""
        if not 0 < head.lines <= self.head.lines:
            return head.lines == 0
        with self.path.open("rb") as file:
            line = next(islice(file, head.lines - 1, None), b"")
        return _hash(line.rstrip(b"\n")) == head.hash

    def note(self, event: str, **fields: Any) -> None:
        """One line; where there is no room, as soon as ``sync`` finds some."""
        with self._lock:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            entry = {"n": self.head.lines, "time": now, "event": event, **fields, "previous": self.head.hash}
            line = json.dumps(entry, separators=(",", ":")).encode()
            self.head = Head(self.head.lines + 1, _hash(line))
            self._pending.append(line + b"\n")
            self._unsynced += len(line) + 1
            with suppress(OSError):
                self._write()
            much = self._unsynced > MOST_UNSYNCED
        if much:
            with suppress(OSError):
                self.sync()

    def _write(self) -> None:
        while self._pending:
            text = b"".join(self._pending)
            written = os.write(self._file, text)
            rest = text[written:]
            self._pending = [rest] if rest else []

    def require_room(self) -> None:
        """Raises an ``OSError`` while lines wait for room: what needs a line of its own has to wait, too."""
        with self._lock:
            self._write()

    def sync(self) -> Head:
        """Makes sure that all lines so far survive a power cut; the head.

        Threads that call it during a sync wait for that one; then one more sync serves all of them.
        """
        wanted = self.head.lines
        with self._syncing:
            if self.durable.lines < wanted:
                with self._lock:
                    self._write()
                    head, self._unsynced = self.head, 0
                os.fdatasync(self._file)  # others may write meanwhile
                self.durable = head
            return self.durable

    async def lasting(self) -> None:
        """``sync`` from the event loop, which continues meanwhile."""
        if self.durable.lines < self.head.lines:
            await asyncio.to_thread(self.sync)

    def close(self) -> None:
        with self._syncing, self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1  # later lines go nowhere


def read_audit(folder: Path) -> Iterator[dict[str, Any]]:
    """The entries of the log in ``folder``, each with its own ``hash``; an error at the first false one."""
    path = folder / NAME
    previous, number = BEGINNING, 0
    try:
        file = path.open("rb")
    except OSError as error:
        raise HoldfastError(f"{path} cannot be read ({error.strerror}); name a member's folder") from None
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # being written, or torn by a power cut: the member mends it when it starts
            text = line[:-1]
            try:
                entry = json.loads(text)
                chained = (entry["n"], entry["previous"]) == (number, previous)
                types = {key: KINDS[key] for key in KINDS.keys() & entry.keys()}
                whole = {"time", "event"} <= entry.keys() and all(type(entry[k]) is types[k] for k in types)
            except (ValueError, KeyError, TypeError, RecursionError):
                entry, chained, whole = {}, False, False
            if chained and not whole:
                raise AuditError(f"{path}, line {number + 1}: it was changed, no member writes such a line")
            if not chained:
                raise AuditError(
                    f"{path}, line {number + 1}: it does not follow the line before; one of the two "
                    "was changed, or lines between them are missing"
                )
            previous, number = _hash(text), number + 1
            yield entry | {"hash": previous}


def check_heads(folder: Path, entries: Iterable[dict[str, Any]], heads: Iterable[tuple[str, Head]]) -> None:
    """Refuses a log without a line that others have seen at its end; ``heads``: which member saw what."""
    hashes = [BEGINNING, *(entry["hash"] for entry in entries)]
    for who, head in heads:
        if head.lines >= len(hashes):
            raise AuditError(
                f"{folder / NAME} has {len(hashes) - 1} lines, but {who} has seen {head.lines}: "
                "lines at the end are missing"
            )
        if hashes[head.lines] != head.hash:
            raise AuditError(
                f"{folder / NAME}, line {head.lines}: {who} has seen another one; the log was rewritten"
            )


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
