"""Starting ranks on this machine, and recognising a job that torchrun or a scheduler started again."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.engines.cluster.ranks import under_torchrun

INTERRUPTED = 130


def start_processes(processes: int, arguments: list[str]) -> int:
    """``holdfast`` with ``arguments`` on so many ranks of this machine, by torchrun; the exit code.

    Ctrl-C and SIGTERM are passed on; the ranks then save, and stop.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if processes < 1:
        raise HoldfastError(f"processes: should be at least 1, got {processes}")
    if under_torchrun():
        raise HoldfastError("processes: torchrun has started the processes already; leave it out")
    logging.disable(logging.ERROR)  # torchrun's own: the ranks speak for themselves
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    local = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(processes)]
    try:
        run(parse_args([*local, "-m", "holdfast", *arguments]))
    except SignalException:
        return INTERRUPTED
    except ChildFailedError as error:  # it has said why
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"error: rank {rank} was killed by {failure.signal_name()}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    return 0


def launch_id() -> str | None:
    """What this job keeps when torchrun or the scheduler starts it again; None if nothing tells."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    # Without --rdzv-id all jobs are called "none"; then torchrun's process, which outlives its ranks, tells.
    return f"{socket.gethostname()}:{os.getppid()}" if given == "none" else given


def run_to_continue(root: Path, launch: str | None, digest: str) -> Path | None:
    """The run directory of this very job and experiment, if it was started before and is not finished."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    # In a container the next torchrun may have the same number: without an id, only a restart continues.
    if launch is None or (os.environ.get("TORCHELASTIC_RUN_ID") == "none" and not restarted):
        return None
    for path in sorted(root.glob("*/summary.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            summary = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            continue
        same = (summary.get("launch"), summary.get("digest")) == (launch, digest)
        if same and (restarted or summary.get("status") != "complete"):
            return path.parent
    return None
