"""What a member has to remember about membership, whatever happens: its votes, and all rosters so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from holdfast.core.errors import HoldfastError
from holdfast.core.files import make_folder, sync_folder, write_atomic
from holdfast_deploy.membership.agreement import Decision, Vote
from holdfast_deploy.membership.roster import Checked, Order, Roster
from holdfast_deploy.storage.links import new_incarnation
from holdfast_deploy.storage.messages import DamagedError, Incarnations, Number


class Remembered(Checked):
    """What changes, in one file, so that it changes as a whole."""

    incarnation: str  # of this folder
    registered: bool = False  # whether a majority knows it: only then a member takes part
    known: Incarnations = Field(default={})  # of other members
    roster: Number = 0  # up to which ``known`` is right
    vote: Vote = Vote(number=1)
    order: Order | None = None  # the coordinator's latest


class Ledger:
    """A member's folder ``membership``: ``memory.json``, and ``roster-N.json`` for each roster after 0."""

    def __init__(self, folder: Path, first: Roster) -> None:
        self.folder, self.first, self.path = folder, first, folder / "memory.json"
        make_folder(folder)
        _refuse_epochs(folder)
        sync_folder(folder)  # a process that was killed may have left names that are not durable
        self.memory = Remembered(incarnation=new_incarnation())
        if self.path.exists():
            self.memory = _read(self.path, Remembered)
        else:
            self._write(self.path.name, self.memory)
        self.decisions = read_decisions(folder)
        for decision in self.decisions[self.memory.roster :]:  # decided right before a crash
            self._know(decision.roster)

    @property
    def behind(self) -> bool:
        """Whether a decision was lost that this member knew: until others have told it, it must not vote."""
        return self.roster.number < self.memory.roster

    @property
    def roster(self) -> Roster:
        """The latest."""
        return self.decisions[-1].roster if self.decisions else self.first

    @property
    def vote(self) -> Vote:
        """What this member has promised and voted for about the next roster."""
        vote, number = self.memory.vote, self.roster.number + 1
        return vote if vote.number == number else Vote(number=number)

    def remember(self, **changes: Any) -> None:
        """Writes down ``changes`` of ``Remembered``, for good."""
        changed = self.memory.model_copy(update=changes)
        if changed != self.memory:
            self._write(self.path.name, changed)
            self.memory = changed

    def decide(self, decision: Decision) -> None:
        """The next roster, for good."""
        self._write(f"roster-{decision.roster.number}.json", decision)
        self.decisions.append(decision)
        self._know(decision.roster)

    def _know(self, roster: Roster) -> None:
        """Whoever begins ``roster`` with a new folder may come with another incarnation."""
        if roster.number <= self.memory.roster:  # its file was lost, what followed from it was not
            return
        anew = set(roster.joined) - set(roster.incarnations)
        known = {name: inc for name, inc in self.memory.known.items() if name not in anew}
        self.remember(roster=roster.number, known={**known, **roster.incarnations})

    def _write(self, name: str, content: Checked) -> None:
        write_atomic(self.folder / name, content.model_dump_json().encode() + b"\n")


def read_decisions(folder: Path) -> list[Decision]:
    """About all rosters after the first, up to one whose file is damaged: others have it, see ``behind``."""
    _refuse_epochs(folder)
    decisions: list[Decision] = []
    while (path := folder / f"roster-{len(decisions) + 1}.json").exists():
        try:
            decisions.append(_read(path, Decision))
        except DamagedError:
            break
    return decisions


def _refuse_epochs(folder: Path) -> None:
    """Before version 0.2, rosters were called epochs, also in these files."""
    path = folder / "memory.json"
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError:  # damaged
        return
    if isinstance(found, dict) and "epoch" in found:
        raise HoldfastError(
            f"{path} was written by an earlier version of holdfast: finish the run with that version, or "
            "start all members in empty folders"
        )


def _read(path: Path, model: Any) -> Any:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedError(
            f"{path} is damaged: take the whole folder of this member away, and have the coordinator run "
            "'holdfast federation replace'"
        ) from None
