"""Where a run took place: versions, device, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch

import holdfast


def describe_environment(
    device: str, seeds: list[int], processes: int = 1
) -> dict[str, str | int | list[int] | None]:
    """Everything one would ask when a result cannot be reproduced."""
    chosen = torch.device(device)
    gpu = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else None
    return {
        "holdfast": holdfast.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build, such as 2.15.0+cu132, which package metadata may lack
        **{name: version(name) for name in ("numpy", "networkx", "scikit-learn")},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": device,
        "processes": processes,
        "seeds": seeds,
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of holdfast's own source, with ``+`` if changed since; None if it is not a checkout."""
    source = Path(holdfast.__file__).resolve().parent
    if not (
        source.parent / ".git"
    ).exists():  # installed; the folder above may be a checkout of something else
        return None
    try:
        ask = ["git", "-C", str(source), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
