"""Real processes, to be killed at will, without importing torch again in each.

A server process that has imported everything forks them.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FORKS = multiprocessing.get_context("forkserver")
# torch imports its compiler, which takes as long as torch itself, at the first gradient of torch.func.
FORKS.set_forkserver_preload(
    [
        *("torch._dynamo", "holdfast.engines.cluster.launch", "holdfast.report.html"),
        *("holdfast.report.progress", "holdfast_deploy.cli.hosting", "federation_runs", "cluster_ranks"),
    ]
)

# Where the server process finds these modules, and what they import.
_TESTS = Path(__file__).parent.parent
_FOLDERS = [_TESTS, _TESTS / "support", _TESTS / "contract"]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _FOLDERS), *filter(None, [os.getenv("PYTHONPATH")])])


class Forked:
    """A process of its own that does ``work`` in ``folder``; used like a ``subprocess.Popen`` with pipes."""

    def __init__(self, folder: Path, work: Callable[..., None], *arguments: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="forked-"))  # what it prints is not among what it writes
        given = (folder, dict(os.environ), torch.get_num_threads(), self.folder, work, arguments)
        self.process = FORKS.Process(target=_begin, args=given)
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it printed, and what it complained of, once it is over."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        printed = (self.folder / "out").read_text(), (self.folder / "err").read_text()
        shutil.rmtree(self.folder)
        return printed


def _begin(
    folder: Path,
    environment: dict[str, str],
    threads: int,
    prints: Path,
    work: Callable[..., None],
    given: Any,
) -> None:
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        os.dup2(os.open(prints / name, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, "")
    torch.set_num_threads(threads)
    work(*given)


def command(*arguments: str) -> None:
    """``holdfast`` with ``arguments``."""
    from holdfast.cli import main

    sys.argv = ["holdfast", *arguments]
    main()


def python(code: str) -> None:
    """``python -c code``."""
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def run_python(code: str, folder: Path) -> tuple[str, str]:
    """What ``code`` prints and what it complains of; it must end well."""
    running = Forked(folder, python, code)
    out, err = running.communicate()
    assert running.returncode == 0, err
    return out, err
