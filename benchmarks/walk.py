"""How many files a reader has to open to follow one request: those in which it calls a function.

python benchmarks/walk.py [train run node] [--files]

``train``: ``hf.train`` of one round of four nodes on a ring. ``run``: ``holdfast run rounds=1`` from the
command line to the report. ``node``: two deployed nodes on this machine, from opening their sites to the
final model after one round; files of holdfast_deploy count as well. Every request is made twice, and the
second is counted, so that imports are not.
``zero`` is how often it runs a method on the zero problem, to learn what the method sends and keeps.
``--files`` lists the files in the order of the first call.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import holdfast as hf
import holdfast_deploy
from holdfast.cli.app import app

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from federation_runs import deploy, describe

ROOTS = tuple(f"{Path(package).resolve()}{os.sep}" for package in (*hf.__path__, *holdfast_deploy.__path__))
RUNS_THE_METHOD = {"round", "client"}  # names of the functions of a method that do a round's work


@dataclass
class Walk:
    """What was called, as ``sys.setprofile`` tells of it, in all threads."""

    files: dict[str, None] = field(default_factory=dict)  # in the order of the first call
    functions: set[tuple[str, str]] = field(default_factory=set)
    zero: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A call, of whatever; only those of our own functions count."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOTS):
            return
        root = next(root for root in ROOTS if code.co_filename.startswith(root))
        name = code.co_filename.removeprefix(str(Path(root).parent) + os.sep)
        with self._lock:
            self.files.setdefault(name)
            self.functions.add((name, code.co_qualname))
            if code.co_name in RUNS_THE_METHOD and name.startswith("holdfast/algorithms"):
                oracle = frame.f_locals.get("oracle")
                self.zero += type(getattr(oracle, "problem", None)).__name__ == "ZeroProblem"


def walked(request: Callable[[], object]) -> Walk:
    """What ``request`` calls, once all that it needs is imported."""
    request()
    walk = Walk()
    threading.setprofile(walk.note)
    sys.setprofile(walk.note)
    try:
        request()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk


def train() -> None:
    """Four nodes with data of their own, a linear model, a ring."""
    rng = np.random.default_rng(0)
    data = [(rng.standard_normal((20, 5), dtype=np.float32), rng.integers(0, 3, 20)) for _ in range(4)]
    hf.train(algorithm=hf.LocalGECL(lr=0.1), model="linear", data=data, rounds=1, topology="ring")


def run() -> None:
    """The default experiment with a single round."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(StringIO()):
        app(["run", "rounds=1", "--quiet"], standalone_mode=False)


def node() -> None:
    """Two nodes in threads of this process, linked to each other."""
    with tempfile.TemporaryDirectory() as folder:
        raw = describe({"name": "local-gecl", "lr": 0.1}, nodes=2, rounds=1)
        deploy(raw, Path(folder))


REQUESTS: dict[str, Callable[[], None]] = {"train": train, "run": run, "node": node}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("requests", nargs="*", default=list(REQUESTS), metavar="request")
    parser.add_argument("--files", action="store_true", help="list them")
    options = parser.parse_args()
    for name in options.requests:
        walk = walked(REQUESTS[name])
        print(f"{name:6} {len(walk.files):4} files {len(walk.functions):5} functions {walk.zero:3} zero")
        if options.files:
            print("       " + " › ".join(walk.files))


if __name__ == "__main__":
    main()
