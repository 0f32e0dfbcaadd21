"""What can be done to files and folders, and what can leave a process, as a list in the order of events."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Made(NamedTuple):
    """A file or a folder was made: ``name`` in ``folder``."""

    folder: int
    name: str
    what: int
    is_folder: bool


class Renamed(NamedTuple):
    """Also a second name for a file, if ``before`` is None."""

    before: tuple[int, str] | None
    folder: int
    name: str
    what: int


class Gone(NamedTuple):
    folder: int
    name: str


class Written(NamedTuple):
    what: int
    offset: int
    content: bytes


class Cut(NamedTuple):
    what: int
    size: int


class Synced(NamedTuple):
    """All that was done to ``what``, a file or a folder, before the event number ``upto`` is durable."""

    what: int
    upto: int


class Left(NamedTuple):
    """A body is handed to aiohttp: a question with what is said beside it, or an answer to ``question``."""

    method: str
    answer: bool
    question: bytes
    frame: bytes
    beside: dict[str, str]


class Event(NamedTuple):
    at: int  # of a clock that all processes have
    what: Made | Renamed | Gone | Written | Cut | Synced | Left


ROOT = 0  # the folder that holds all others, which is there, and durable


def read_events(target: Path) -> list[Event]:
    """All that was recorded in ``target``."""
    events = []
    with suppress(FileNotFoundError), target.open("rb") as file, suppress(EOFError):
        while True:
            events.append(pickle.load(file))
    return events
