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

from holdfast.core.errors import HoldfastError
from holdfast.core.files import settle
from holdfast.engines.deploy.storage.identity import read_identity, write_identity
from holdfast.engines.deploy.storage.messages import DamagedError, Incarnations, MessageFile, begin, put

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
    kept.mkdir(exist_ok=True)
    target = kept / str(before)
    if not target.exists():
        os.link(previous, target)
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
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise HoldfastError(f"{folder} is in use by another process; stop that one first") from None
        state = _find(folder, to, same)
        if state.header.notes.get("rolled_back") == to and not any((folder / "outbox").iterdir()):
            return state.header.round  # done before
        _rewrite(state, folder / "state", to)
        for name in ("state.previous", *RESULTS):
            (folder / name).unlink(missing_ok=True)
        for name in FILES:
            shutil.rmtree(folder / name)
            (folder / name).mkdir()
        kept = folder / "snapshots"
        for later in [round for round in _rounds(kept) if round >= state.header.round]:
            (kept / str(later)).unlink()
        identity = read_identity(folder / "identity.json")
        renewed = _renewed({"own": identity["incarnation"]}, to)["own"]
        write_identity(folder / "identity.json", identity | {"incarnation": renewed})
    return state.header.round


def _find(folder: Path, to: int, same: Callable[[int], bool]) -> MessageFile:
    kept = folder / "snapshots"
    paths = [folder / "state", folder / "state.previous", *(kept / str(round) for round in _rounds(kept))]
    found: dict[int, MessageFile] = {}
    for path in paths:
        try:
            state = MessageFile(path)
            state.verify()
        except (DamagedError, FileNotFoundError):
            continue
        found.setdefault(state.header.round, state)
    fitting = [round for round in found if round <= to and same(round)]
    if not fitting:
        rounds = ", ".join(map(str, sorted(found))) or "none"
        raise HoldfastError(
            f"--to {to}: {folder} has kept the states of the rounds {rounds}; choose one that all have "
            "(limits.snapshots says how many are kept)"
        )
    return found[max(fitting)]


def _renewed(incarnations: Incarnations, to: int) -> Incarnations:
    return {
        name: hashlib.sha256(f"{old} rolled back to {to}".encode()).hexdigest()[:16]
        for name, old in incarnations.items()
    }


def _rewrite(state: MessageFile, target: Path, to: int) -> None:
    """The same state, which depends on the members as they are after rolling back."""
    changes = {
        "depends_on": _renewed(state.header.depends_on, to),
        "notes": state.header.notes | {"rolled_back": to},
    }
    header = state.header.model_copy(update=changes).sealed(state.header.content)
    temporary = target.with_name(f".{target.name}.partial")
    with temporary.open("wb", buffering=0) as file:
        begin(file, header)
        for piece in state.chunks():
            put(file, piece)
        os.fsync(file.fileno())
    settle(temporary, target)
