"""What is left of a folder after a power cut, at worst: what was synced, and nothing else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

File = tuple[int, int]  # device and inode


def file_of(path: Path) -> File:
    """Which one it is."""
    status = path.stat()
    return status.st_dev, status.st_ino


class Synced:
    """What of files and folders was synced since this began to watch."""

    def __init__(self) -> None:
        self.files: set[File] = set()  # their content
        self.names: dict[File, dict[str, int]] = {}  # of a folder: what it listed, and the inodes

    def note(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        which = (status.st_dev, status.st_ino)
        if stat.S_ISDIR(status.st_mode):
            with os.scandir(descriptor) as entries:
                self.names[which] = {entry.name: entry.inode() for entry in entries}
        else:
            self.files.add(which)

    def cut(self, folder: Path) -> list[str]:
        """Takes away every file of ``folder`` whose name or content was not synced; their names."""
        status = folder.stat()
        kept = self.names.get((status.st_dev, status.st_ino), {})
        lost = []
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            of = path.stat()
            if kept.get(path.name) != of.st_ino or (of.st_dev, of.st_ino) not in self.files:
                path.unlink()
                lost.append(path.name)
        return lost


@contextmanager
def watched() -> Iterator[Synced]:
    """Watches all that is synced in this process."""
    synced, fsync = Synced(), os.fsync

    def noting(descriptor: int) -> None:
        fsync(descriptor)
        synced.note(descriptor)

    os.fsync = noting
    try:
        yield synced
    finally:
        os.fsync = fsync
