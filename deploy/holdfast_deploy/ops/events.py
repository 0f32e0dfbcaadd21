"""The log of a member: structured lines for its operators, and for its audit log."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from holdfast.core.errors import printable
from holdfast.core.files import json_text
from holdfast_deploy.ops.audit import AuditLog

Level = Literal["info", "warning", "error"]
Writer = Callable[[dict[str, Any]], None]

REPEAT_AFTER = 600.0  # seconds before the same complaint is written again; until then it is only counted
MOST_KINDS = 1000  # of complaints that are remembered


@dataclass
class Events:
    """The log of one member. Nothing floods it: complaints that repeat are counted."""

    name: str
    write: Writer
    last_error: str = ""  # or warning
    complaints: Counter[str] = field(default_factory=Counter)  # by kind, for the metrics
    trail: AuditLog | None = None  # once the member has a folder
    _written: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def log(self, event: str, level: Level = "info", **fields: Any) -> None:
        """One line. Texts may be others' words, such as the name in a certificate."""
        fields = {key: printable(value) if isinstance(value, str) else value for key, value in fields.items()}
        if level != "info":
            self.last_error = " ".join([event, *map(str, fields.values())])
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.write({"time": stamp, "level": level, "node": self.name, "event": event, **fields})

    def complain(self, event: str, **fields: Any) -> None:
        """One line now, and for the same kind of complaint about the same peer only after a while.

        A ``reason`` is of the same kind if it differs in numbers, or after its first colon: what the other
        end makes up must not flood the log.
        """
        kind = re.sub(r"\d+", "#", str(fields.get("reason", "")).partition(":")[0])
        now, key = time.monotonic(), (event, str(fields.get("peer", "")), kind)
        with self._lock:
            self.complaints[event] += 1
            if now - self._written.get(key, -REPEAT_AFTER) < REPEAT_AFTER:
                return
            self._written.pop(key, None)
            if len(self._written) >= MOST_KINDS:
                del self._written[next(iter(self._written))]  # the oldest
            self._written[key] = now
        self.log(event, "warning", **fields)
        self.audit(event, **{key: printable(str(value)) for key, value in fields.items()})

    def audit(self, event: str, **fields: Any) -> None:
        """A line in the audit log."""
        if self.trail is not None:
            self.trail.note(event, **fields)

    def require_room(self) -> None:
        """Raises an ``OSError`` while the audit log has no room for its lines."""
        if self.trail is not None:
            self.trail.require_room()

    async def lasting(self) -> None:
        """Waits until all lines of the audit log so far survive a power cut: what they tell of may leave."""
        if self.trail is not None:
            await self.trail.lasting()


def json_lines(entry: dict[str, Any]) -> None:
    """Structured lines on standard error."""
    with suppress(OSError):  # a log on a full disk: the member itself waits for room, and says so later
        print(json_text(entry), file=sys.stderr, flush=True)


class _ToEvents(logging.Handler):
    """What libraries log, and Python's warnings, as entries of a member's log."""

    def __init__(self, events: Events) -> None:
        super().__init__(logging.WARNING)
        self.events = events

    def emit(self, record: logging.LogRecord) -> None:
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        text = self.format(record)
        self.events.log("said", level, by=record.name, text=text)


@contextmanager
def nothing_but_entries(events: Events) -> Iterator[None]:
    """Whatever libraries have to say becomes entries, so that a log of JSON lines has nothing else in it."""
    handler, root = _ToEvents(events), logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)


def describe(entry: dict[str, Any]) -> str:
    """A log entry as one readable line."""
    known = ("time", "level", "node", "event")
    rest = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in known)
    level = "" if entry["level"] == "info" else f"{entry['level']}: "
    return f"{entry['time'][11:19]} {entry['node']}: {level}{entry['event']}" + (f" ({rest})" if rest else "")


def silence(entry: dict[str, Any]) -> None:
    """No log."""
