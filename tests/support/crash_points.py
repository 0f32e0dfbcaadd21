"""What a disk may hold after a power cut: what was synced, and of all else any part, in any combination."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from disk_events import ROOT, Cut, Event, Gone, Left, Made, Renamed, Synced, Written

Survives = Callable[[int], float]  # of an event that was not synced, how much: 0 nothing, 1 all


def nothing(_: int) -> Survives:
    """The strictest disk."""
    return lambda event: 0.0


def everything(_: int) -> Survives:
    """As when the process alone is killed."""
    return lambda event: 1.0


def anything(seed: int, count: int) -> Survives:
    """Each by itself, at a power cut after ``count`` events; of what was written, perhaps a part."""

    def survives(event: int) -> float:
        draw = random.Random(f"{seed} {count} {event}")
        return draw.choice([0.0, 0.0, 1.0, 1.0, draw.random()])

    return survives


def _about(what: object) -> set[int]:
    """Which files and folders have to be synced before the change is durable."""
    match what:
        case Made() | Gone():
            return {what.folder}
        case Renamed():
            return {what.folder} | (set() if what.before is None else {what.before[0]})
        case Written() | Cut():
            return {what.what}
    return set()


def durable(events: Sequence[Event]) -> set[int]:
    """The numbers of the events that a power cut right after the last one takes nothing of."""
    upto: dict[int, int] = {}
    for event in events:
        if isinstance(event.what, Synced):
            upto[event.what.what] = max(event.what.upto, upto.get(event.what.what, 0))
    return {i for i, e in enumerate(events) if (on := _about(e.what)) and all(i < upto.get(w, 0) for w in on)}


Remains = dict[str, bytes | None]  # by path; None: a folder


def remains(events: Sequence[Event], survives: Survives) -> Remains:
    """What is left of the folder after ``events`` and a power cut."""
    folders: dict[int, dict[str, int]] = {ROOT: {}}
    files: dict[int, bytearray] = {}
    kept = durable(events)
    for i, event in enumerate(events):
        if isinstance(event.what, Synced | Left):
            continue
        part = 1.0 if i in kept else survives(i)
        match event.what:
            case Made(folder, name, what, is_folder):
                if is_folder:
                    folders[what] = {}
                else:
                    files[what] = bytearray()
                if part:
                    folders[folder][name] = what
            case Renamed(before, folder, name, what) if part:
                if before is not None:
                    folders[before[0]].pop(before[1], None)
                folders[folder][name] = what
            case Gone(folder, name) if part:
                folders[folder].pop(name, None)
            case Written(what, offset, content) if part:
                file, size = files[what], max(1, round(part * len(content)))
                first = len(content) - size if part < 0.5 else 0  # its end alone, or its beginning
                file.extend(bytes(max(0, offset + first + size - len(file))))
                file[offset + first : offset + first + size] = content[first : first + size]
            case Cut(what, size) if part:
                file = files[what]
                del file[size:]
                file.extend(bytes(size - len(file)))
    return dict(_listed(folders, files, ROOT, ""))


def _listed(
    folders: dict[int, dict[str, int]], files: dict[int, bytearray], what: int, path: str
) -> Iterator[tuple[str, bytes | None]]:
    for name, inner in folders[what].items():
        if inner in folders:
            yield path + name, None
            yield from _listed(folders, files, inner, f"{path}{name}/")
        else:
            yield path + name, bytes(files[inner])


def write_remains(left: Remains, target: Path) -> None:
    """Into the new folder ``target``."""
    target.mkdir()
    for name, content in left.items():
        if content is None:
            (target / name).mkdir()
        else:
            (target / name).write_bytes(content)
            (target / name).chmod(0o600)
