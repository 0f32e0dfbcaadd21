"""What a member has to remember about membership, whatever happens: its votes, and all epochs so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from holdfast.core.files import make_folder, sync_folder, write_atomic
from holdfast_deploy.agreement import Decision, Vote
from holdfast_deploy.epochs import Checked, Epoch, Order
from holdfast_deploy.storage.links import new_incarnation
from holdfast_deploy.storage.messages import DamagedError, Incarnations, Number


class Remembered(Checked):
    """What changes, in one file, so that it changes as a whole."""

    incarnation: str  # of this folder
    registered: bool = False  # whether a majority knows it: only then a member takes part
    known: Incarnations = Field(default={})  # of other members
    epoch: Number = 0  # up to which ``known`` is right
    vote: Vote = Vote(number=1)
    order: Order | None = None  # the coordinator's latest


class Ledger:
    """The folder ``membership`` of a member: ``memory.json``, and ``epoch-N.json`` for each epoch after 0."""

    def __init__(self, folder: Path, first: Epoch) -> None:
        self.folder, self.first, self.path = folder, first, folder / "memory.json"
        make_folder(folder)
        sync_folder(folder)  # a process that was killed may have left names that are not durable
        self.memory = Remembered(incarnation=new_incarnation())
        if self.path.exists():
            self.memory = _read(self.path, Remembered)
        else:
            self._write(self.path.name, self.memory)
        self.decisions = read_decisions(folder)
        for decision in self.decisions[self.memory.epoch :]:  # decided right before a crash
            self._know(decision.epoch)

    @property
    def behind(self) -> bool:
        """Whether a decision was lost that this member knew: until others have told it, it must not vote."""
        return self.epoch.number < self.memory.epoch

    @property
    def epoch(self) -> Epoch:
        """The latest."""
        return self.decisions[-1].epoch if self.decisions else self.first

    @property
    def vote(self) -> Vote:
        """What this member has promised and voted for about the next epoch."""
        vote, number = self.memory.vote, self.epoch.number + 1
        return vote if vote.number == number else Vote(number=number)

    def remember(self, **changes: Any) -> None:
        """Writes down ``changes`` of ``Remembered``, for good."""
        changed = self.memory.model_copy(update=changes)
        if changed != self.memory:
            self._write(self.path.name, changed)
            self.memory = changed

    def decide(self, decision: Decision) -> None:
        """The next epoch, for good."""
        self._write(f"epoch-{decision.epoch.number}.json", decision)
        self.decisions.append(decision)
        self._know(decision.epoch)

    def _know(self, epoch: Epoch) -> None:
        """Whoever begins ``epoch`` with a new folder may come with another incarnation."""
        if epoch.number <= self.memory.epoch:  # its file was lost, what followed from it was not
            return
        anew = set(epoch.joined) - set(epoch.incarnations)
        known = {name: inc for name, inc in self.memory.known.items() if name not in anew}
        self.remember(epoch=epoch.number, known={**known, **epoch.incarnations})

    def _write(self, name: str, content: Checked) -> None:
        write_atomic(self.folder / name, content.model_dump_json().encode() + b"\n")


def read_decisions(folder: Path) -> list[Decision]:
    """About all epochs after the first, up to one whose file is damaged: others have it, see ``behind``."""
    decisions: list[Decision] = []
    while (path := folder / f"epoch-{len(decisions) + 1}.json").exists():
        try:
            decisions.append(_read(path, Decision))
        except DamagedError:
            break
    return decisions


def _read(path: Path, model: Any) -> Any:
    try:
        return model.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedError(
            f"{path} is damaged: take the whole folder of this member away, and have the coordinator run "
            "'holdfast federation replace'"
        ) from None
