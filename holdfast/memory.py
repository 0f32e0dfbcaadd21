"""Whether something fits into memory, asked before it is made."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from holdfast.errors import HoldfastError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


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
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Has glibc hold on to large blocks that are freed, instead of giving them back to the system.

    Every step frees and asks for the same megabytes; having them mapped anew each time takes longer than the
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
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
