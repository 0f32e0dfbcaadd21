"""A node's models after its last rounds: neighbours may be behind, and all go on from the same round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.engines.deploy.storage.messages import Header, MessageFile, write_message
from holdfast.engines.deploy.storage.store import remove


class KeptModels:
    """The files ``models/ROUND``; those more than ``window`` rounds old go, unless they are ``needed``.

    ``needed``: whether the member has promised to keep all, until the next epoch is decided.
    """

    def __init__(self, folder: Path, window: int, needed: Callable[[], bool]) -> None:
        self.folder, self.window, self.needed = folder / "models", window, needed
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()  # a promise must not come between looking and removing

    @property
    def rounds(self) -> list[int]:
        """Those that models are kept of."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def keep(self, header: Header, row: Any) -> None:
        """The model ``row`` after ``header.round`` rounds."""
        write_message(self.folder / str(header.round), header, row)
        with self.lock:
            if not self.needed():
                for old in self.rounds:
                    if old < header.round - self.window:
                        remove(self.folder / str(old))

    def find(self, round: int) -> MessageFile | None:
        """The model after ``round`` rounds, if it is here and intact."""
        path = self.folder / str(round)
        if not path.exists():
            return None
        message = MessageFile(path)
        message.verify()
        return message
