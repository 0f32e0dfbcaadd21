"""States of earlier rounds, kept so that all members can go back to before something went wrong.

A snapshot is a second name for a state file that would otherwise be deleted. All members keep those of the
same rounds, so that they have some in common.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.core.errors import HoldfastError
from holdfast.core.files import make_folder, replace_durably, sync_folder
from holdfast_deploy.storage.messages import DamagedError, Incarnations, MessageFile, begin, put
from holdfast_deploy.storage.store import read_identity, write_identity

RESULTS = ("report.json", "parted", "model.safetensors", "personal.safetensors")
FILES = ("outbox", "inbox", "decisions")


def keep(folder: Path, done: int, every: int, count: int) -> None:
    """After the state of ``done`` rounds was saved: keeps the one before, if it is that of every k-th round.

    A client that was not in a round's cohort has the same state after it as before.
    """
    previous = folder / "state.previous"
    if count == 0 or not previous.exists():
        return
    before = MessageFile(previous).header.round
    if -(-before // every) * every >= done:  # the first such round from there on has not been finished
        return
    kept = folder / "snapshots"
    make_folder(kept)
    target = kept / str(before)
    if not target.exists():
        os.link(previous, target)
        sync_folder(kept)
    for old in _rounds(kept)[:-count]:
        (kept / str(old)).unlink()


def _rounds(kept: Path) -> list[int]:
    return sorted(int(path.name) for path in kept.glob("*") if path.name.isdigit())


def put_back(folder: Path, to: int, same: Callable[[int], bool]) -> int:
    """Puts the member in ``folder`` back to the end of round ``to``; the round of the state that was taken.

    ``same(r)``: whether the member's state after round r is also its state after round ``to``. Whoever rolls
    back gets a new incarnation, which follows from the old one and the round. So those who did agree with one
    another again, and whoever did not is noticed.
    """
    if not (folder / "identity.json").exists():
        raise HoldfastError(f"{folder} is not the folder of a member; name it with --dir")
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HoldfastError(f"{folder} is in use by another process; stop that one first") from None
        identity = read_identity(folder / "identity.json")
        now = identity["incarnation"]
        run = Run(identity["name"], now, _renewed({"own": now}, to)["own"])
        state = _find(folder, to, same, run)
        done_before = state.header.notes.get("rolled_back") == to and run.of(state) == run.now
        if done_before and state.path == folder / "state" and not any((folder / "outbox").iterdir()):
            return state.header.round
        _rewrite(state, folder / "state", to, run, rolled_back=to)
        for name in ("state.previous", *RESULTS):
            (folder / name).unlink(missing_ok=True)
        for name in FILES:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir()
        kept = folder / "snapshots"
        for round in _rounds(kept):
            if round >= state.header.round:
                (kept / str(round)).unlink()
            elif (earlier := _intact(kept / str(round), run)) is not None:  # one may go back further, later
                _rewrite(earlier, kept / str(round), to, run)
        sync_folder(folder)
        write_identity(folder / "identity.json", identity | {"incarnation": run.renewed})  # last: all is done
    return state.header.round


class Run(NamedTuple):
    """Of a member that is put back: its name, and its incarnations before and after."""

    name: str
    now: str
    renewed: str

    def of(self, state: MessageFile) -> str | None:
        """The incarnation that ``state`` is of."""
        return state.header.depends_on.get(self.name)


def _find(folder: Path, to: int, same: Callable[[int], bool], run: Run) -> MessageFile:
    kept = folder / "snapshots"
    paths = [folder / "state", folder / "state.previous", *(kept / str(round) for round in _rounds(kept))]
    found: dict[int, MessageFile] = {}
    for path in paths:
        if (state := _intact(path, run)) is not None:
            found.setdefault(state.header.round, state)
    fitting = [round for round in found if round <= to and same(round)]
    if not fitting:
        rounds = ", ".join(map(str, sorted(found))) or "none"
        raise HoldfastError(
            f"--to {to}: {folder} has kept the states of the rounds {rounds}; choose one that all have "
            "(limits.snapshots says how many are kept)"
        )
    return found[max(fitting)]


def _intact(path: Path, run: Run) -> MessageFile | None:
    """The state in ``path``; None if there is none, or if it is damaged or of another run."""
    try:
        state = MessageFile(path)
        state.verify()
    except (DamagedError, FileNotFoundError):
        return None
    return state if run.of(state) in (run.now, run.renewed) else None


def _renewed(incarnations: Incarnations, to: int) -> Incarnations:
    return {
        name: hashlib.sha256(f"{old} rolled back to {to}".encode()).hexdigest()[:16]
        for name, old in incarnations.items()
    }


def _rewrite(state: MessageFile, target: Path, to: int, run: Run, **notes: int) -> None:
    """The same state, which depends on the members as they are after rolling back, with more ``notes``."""
    depends_on = state.header.depends_on
    if run.of(state) == run.now:  # and not renewed already, before a crash
        depends_on = _renewed(depends_on, to)
    changes = {"depends_on": depends_on, "notes": state.header.notes | notes}
    header = state.header.model_copy(update=changes).sealed(state.header.content)
    temporary = target.with_name(f".{target.name}.partial")
    with temporary.open("wb", buffering=0) as file:
        begin(file, header)
        for piece in state.chunks():
            put(file, piece)
        os.fsync(file.fileno())
    replace_durably(temporary, target)
