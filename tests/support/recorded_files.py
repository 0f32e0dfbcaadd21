"""What a process does to the files of one folder, one after the other. ``os`` and ``io`` do what they do."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from disk_events import ROOT, Cut, Event, Gone, Made, Renamed, Synced, Written, read_events


class Recorder:
    """Files are told apart by when they were made: their numbers on the disk are used again."""

    def __init__(self, root: Path, own: str, target: Path, killed: Callable[[Any], bool]) -> None:
        self.root, self.own = root.resolve(), own  # the member's folder, of which alone is recorded
        self.killed = killed  # right after which event the process is
        self.lock = threading.RLock()
        self.known: dict[str, int] = {"": ROOT}  # by path from the root
        self.sizes: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # by file descriptor
        self.events = read_events(target)  # of the same member before it was killed
        for event in self.events:
            self._know(event.what)
        self.count = max(self.known.values())
        self._write, self._out = os.write, os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, what: Any) -> None:
        with self.lock:
            self.events.append(Event(time.monotonic_ns(), what))
            self._write(self._out, pickle.dumps(self.events[-1]))
            if self.killed(what):
                os.kill(os.getpid(), signal.SIGKILL)

    def _know(self, what: Any) -> None:
        """What a change of another process has led to."""
        match what:
            case Made(folder, name, number, _):
                self.known[self._path(folder, name)], self.sizes[number] = number, 0
            case Renamed(before, folder, name, number):
                if before is not None:
                    self.known.pop(self._path(*before), None)
                self.known[self._path(folder, name)] = number
            case Gone(folder, name):
                self.known.pop(self._path(folder, name), None)
            case Written(number, offset, content):
                self.sizes[number] = max(self.sizes[number], offset + len(content))
            case Cut(number, size):
                self.sizes[number] = size

    def _path(self, folder: int, name: str) -> str:
        holder = next(path for path, number in self.known.items() if number == folder)
        return f"{holder}/{name}" if holder else name

    def place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path from the root, if it is of the member's folder."""
        if isinstance(path, int):
            return None
        path = os.path.abspath(os.fsdecode(path)) if dir_fd is None else os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(path):
            holder = next((name for name, w in self.known.items() if w == self.handles.get(dir_fd)), None)
            if holder is None:
                return None
            return f"{holder}/{path}"
        try:
            inner = Path(path).relative_to(self.root).as_posix()
        except ValueError:
            return None
        return inner if inner.split("/")[0] == self.own else None

    def parted(self, place: str) -> tuple[int, str]:
        """The folder of a path, and the name in it."""
        folder, _, name = place.rpartition("/")
        return self.known[folder], name

    def opened(self, place: str, handle: int, *, emptied: bool) -> int:
        """The file at ``place``, which is there now."""
        what = self.known.get(place)
        if what is None:
            what = self.made(place, is_folder=False)
        elif emptied and self.sizes.get(what):
            self.sizes[what] = 0
            self.note(Cut(what, 0))
        self.handles[handle] = what
        return what

    def made(self, place: str, *, is_folder: bool) -> int:
        self.count += 1
        self.known[place] = self.count
        self.sizes[self.count] = 0
        self.note(Made(*self.parted(place), self.count, is_folder))
        return self.count

    def wrote(self, what: int, offset: int, content: bytes) -> None:
        self.sizes[what] = max(self.sizes[what], offset + len(content))
        self.note(Written(what, offset, content))


class RecordedFile(io.FileIO):
    """A file that is written to."""

    def __init__(self, path: Any, mode: str, recorder: Recorder, place: str) -> None:
        self.recorder, self.appends = recorder, "a" in mode
        with recorder.lock:
            super().__init__(path, mode)
            self.what = recorder.opened(place, self.fileno(), emptied="w" in mode)

    def write(self, content: Any) -> int:
        with self.recorder.lock:
            offset = self.recorder.sizes[self.what] if self.appends else self.tell()
            count = super().write(content)
            assert count is not None
            self.recorder.wrote(self.what, offset, bytes(memoryview(content).cast("B")[:count]))
            return count

    def truncate(self, size: int | None = None) -> int:
        with self.recorder.lock:
            size = super().truncate(size)
            self.recorder.sizes[self.what] = size
            self.recorder.note(Cut(self.what, size))
            return size


def record_files(recorder: Recorder) -> None:
    """From here on, for good: this process is the member's."""
    _record_opening(recorder)
    _record_writing(recorder)
    _record_names(recorder)


def _record_opening(recorder: Recorder) -> None:
    plain, os_open = io.open, os.open

    def opening(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        place = recorder.place(file)
        if place is None or not set(mode) & set("wax+"):
            opened = plain(file, mode, buffering, *rest, **named)
            if place is not None:
                recorder.handles[opened.fileno()] = recorder.known.get(place, -1)
            return opened
        raw = RecordedFile(file, mode.replace("b", "").replace("t", ""), recorder, place)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)

    def opening_low(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        with recorder.lock:
            handle = os_open(path, flags, *rest, **named)
            place = recorder.place(path, named.get("dir_fd"))
            if place is not None and flags & (os.O_WRONLY | os.O_RDWR):
                recorder.opened(place, handle, emptied=bool(flags & os.O_TRUNC))
            elif place is not None or Path(os.fsdecode(path)).resolve() == recorder.root:
                recorder.handles[handle] = recorder.known.get(place or "", -1)
            return handle

    io.open = builtins.open = opening
    os.open = opening_low


def _record_writing(recorder: Recorder) -> None:
    write, truncate = os.write, os.ftruncate
    watched = {name: getattr(os, name) for name in ("fsync", "fdatasync")}

    def writing(handle: int, content: Any) -> int:
        with recorder.lock:
            count = write(handle, content)
            what = recorder.handles.get(handle, -1)
            if what in recorder.sizes:
                end = os.lseek(handle, 0, os.SEEK_CUR)
                recorder.wrote(what, end - count, bytes(content[:count]))
            return count

    def truncating(handle: int, size: int) -> None:
        with recorder.lock:
            truncate(handle, size)
            if (what := recorder.handles.get(handle, -1)) in recorder.sizes:
                recorder.sizes[what] = size
                recorder.note(Cut(what, size))

    def syncing(name: str) -> Callable[[Any], None]:
        def sync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            with recorder.lock:
                what = recorder.handles.get(number, -1)
                _catch_up(recorder, what)
                upto = len(recorder.events)
            watched[name](number)  # others go on meanwhile
            if what >= 0:
                recorder.note(Synced(what, upto))

        return sync

    os.write, os.ftruncate = writing, truncating
    os.fsync, os.fdatasync = syncing("fsync"), syncing("fdatasync")


def _catch_up(recorder: Recorder, what: int) -> None:
    """A file that other code than Python's has written is read when it is synced."""
    for place, known in recorder.known.items():
        if known == what and recorder.sizes.get(what) == 0 and (recorder.root / place).is_file():
            if content := (recorder.root / place).read_bytes():
                recorder.wrote(what, 0, content)
            return


def _record_names(recorder: Recorder) -> None:
    mkdir, replace, link = os.mkdir, os.replace, os.link
    taking_away = {name: getattr(os, name) for name in ("unlink", "remove", "rmdir")}

    def making(path: Any, *rest: Any, **named: Any) -> None:
        with recorder.lock:
            mkdir(path, *rest, **named)
            if (place := recorder.place(path)) is not None:
                recorder.made(place, is_folder=True)

    def known(path: Any) -> tuple[str, int]:
        place = recorder.place(path)
        assert place is not None, path
        if place not in recorder.known:  # written by other code than Python's
            what = recorder.made(place, is_folder=False)
            recorder.wrote(what, 0, Path(path).read_bytes())
        return place, recorder.known[place]

    def replacing(path: Any, target: Any, **named: Any) -> None:
        with recorder.lock:
            if recorder.place(target) is None:
                replace(path, target, **named)
                return
            (place, what), new = known(path), recorder.place(target)
            replace(path, target, **named)
            assert new is not None
            del recorder.known[place]
            recorder.known[new] = what
            recorder.note(Renamed(recorder.parted(place), *recorder.parted(new), what))

    def linking(path: Any, target: Any, **named: Any) -> None:
        with recorder.lock:
            link(path, target, **named)
            if (new := recorder.place(target)) is not None:
                recorder.known[new] = known(path)[1]
                recorder.note(Renamed(None, *recorder.parted(new), recorder.known[new]))

    def taking(name: str) -> Callable[..., None]:
        def take(path: Any, *, dir_fd: int | None = None) -> None:
            with recorder.lock:
                taking_away[name](path, dir_fd=dir_fd)
                place = recorder.place(path, dir_fd)
                if place is not None and recorder.known.pop(place, None) is not None:
                    recorder.note(Gone(*recorder.parted(place)))

        return take

    os.mkdir, os.link = making, linking
    os.replace = os.rename = replacing
    for name in taking_away:
        setattr(os, name, taking(name))
