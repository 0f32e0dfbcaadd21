"""A node's models after its last rounds: neighbours may be behind, and all continue from the same round.

Those of a few earlier rounds are kept, too, so that all members can go back to before something went wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from holdfast.core.files import make_folder, sync_folder
from holdfast_deploy.federation import LimitsConfig
from holdfast_deploy.membership.roster import AvailableModels
from holdfast_deploy.storage.messages import DamagedError, Header, MessageFile, write_message
from holdfast_deploy.storage.store import remove

Pinned = Callable[[], AbstractContextManager[bool]]


def all_pinned() -> AbstractContextManager[bool]:
    """For models that nothing is removed of."""
    return nullcontext(True)


class KeptModels:
    """The files ``models/ROUND``; those more than ``window`` rounds old go, unless they are ``pinned``.

    ``pinned``: whether the member has promised to keep all, until the next roster is decided; it promises
    nothing within that context. ``limits`` say which earlier ones stay: the last ``snapshots`` ones of every
    ``snapshot_every``-th round.
    """

    def __init__(self, folder: Path, window: int, pinned: Pinned, limits: LimitsConfig) -> None:
        self.folder, self.window, self.pinned, self.limits = folder / "models", window, pinned, limits
        make_folder(self.folder)
        sync_folder(self.folder)  # a process that was killed may have left names that are not durable

    @property
    def rounds(self) -> list[int]:
        """Those that models are kept of."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def available(self, incarnation: str) -> AvailableModels:
        """What a member with that ``incarnation`` of its folder can continue from."""
        if not (rounds := self.rounds):
            return AvailableModels(incarnation=incarnation)
        there, newest = set(rounds), rounds[-1]
        oldest = next(round for round in range(newest, -2, -1) if round - 1 not in there)
        earlier = [round for round in rounds if round < oldest][-1000:]
        return AvailableModels(incarnation=incarnation, oldest=oldest, newest=newest, earlier=earlier)

    def keep(self, header: Header, row: Any) -> None:
        """The model ``row`` after ``header.round`` rounds."""
        write_message(self.folder / str(header.round), header, row)
        with self.pinned() as pinned:
            if not pinned:
                past = [old for old in self.rounds if old < header.round - self.window]
                for old in set(past) - set(self._snapshots(past)):
                    remove(self.folder / str(old))

    def _snapshots(self, rounds: list[int]) -> list[int]:
        marked = [round for round in rounds if round % self.limits.snapshot_every == 0]
        return marked[-self.limits.snapshots :] if self.limits.snapshots else []

    def inherit(self, before: KeptModels, first: int) -> None:
        """Of the roster ``before``, what all might go back to from a roster that begins with ``first``."""
        for round in before._snapshots([round for round in before.rounds if round < first]):
            with suppress(FileExistsError):  # this was begun before, and broke off
                os.link(before.folder / str(round), self.folder / str(round))
        sync_folder(self.folder)

    def find(self, round: int) -> MessageFile | None:
        """The model after ``round`` rounds, if it is here and intact."""
        path = self.folder / str(round)
        if not path.exists():
            return None
        message = MessageFile(path)
        message.verify()
        return message

    def drop_damaged(self) -> None:
        """Removes models that no member could continue from."""
        for round in self.rounds:
            try:
                self.find(round)
            except DamagedError:
                remove(self.folder / str(round))
