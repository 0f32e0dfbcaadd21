"""Whether something fits into memory, asked before it is made."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from holdfast.core.errors import HoldfastError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
CGROUP = Path("/sys/fs/cgroup")  # where a container's limits are, or those of a batch system


def require_memory(what: str, needed: float, device: str = "cpu") -> None:
    """Refuses ``what`` if the ``needed`` bytes are more than are free on ``device``."""
    available = available_memory(device)
    if needed > available:
        raise HoldfastError(
            f"{what} needs about {needed / 2**30:,.1f} GiB of memory, but {device} has only "
            f"{available / 2**30:,.1f} GiB free: use fewer nodes or a smaller model"
        )


def total_memory(device: torch.device) -> int:
    """All bytes of ``device``, free or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_cgroup_limit()])


def keep_freed_memory() -> None:
    """Has glibc hold on to large blocks that are freed, instead of giving them back to the system.

    Every step frees and asks for the same megabytes; having them mapped again each time takes longer than the
    arithmetic in them. Elsewhere than on glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def available_memory(device: str) -> int:
    """Free bytes on ``device``."""
    if torch.device(device).type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, unused
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        free = _entry(Path("/proc/meminfo"), "MemAvailable:") * 1024
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_left_in_cgroup()])


def _cgroup_limit() -> list[int]:
    """The most bytes that this container may take, if there is a limit."""
    try:
        text = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() else []


def _left_in_cgroup() -> list[int]:
    """What is left of that; files that are merely cached do not count as taken."""
    try:
        cached = _entry(CGROUP / "memory.stat", "inactive_file")
        taken = int((CGROUP / "memory.current").read_text()) - cached
    except (OSError, StopIteration):
        return []
    return [limit - taken for limit in _cgroup_limit()]


def _entry(file: Path, name: str) -> int:
    """The number behind ``name`` in a file of such lines."""
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name))
