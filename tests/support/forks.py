"""Real processes, to be killed at will, without importing torch anew in each.

A server process that has imported everything, and never touched gRPC, forks them.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
# torch imports its compiler, which takes as long as torch itself, at the first gradient of torch.func.
FORKS.set_forkserver_preload(["torch._dynamo", "holdfast.cli.node", "federation_runs", "cluster_ranks"])

# Where the server process finds these modules, and what they import.
_TESTS = Path(__file__).parent.parent
_FOLDERS = [_TESTS, _TESTS / "support", _TESTS / "contract"]
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, _FOLDERS), *filter(None, [os.getenv("PYTHONPATH")])])
