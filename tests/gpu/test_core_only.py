"""The tests for a GPU are collected where only the core dependencies are installed; this needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_they_need_no_extra_and_no_documentation(tmp_path) -> None:
    for part in ("holdfast", "papers", "tests", "pyproject.toml"):  # and nothing else of a clone
        (tmp_path / part).symlink_to(ROOT / part)
    command = [sys.executable, "tests/support/core_only.py", "--collect-only", "-m", "gpu", "tests/gpu"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for file in Path(__file__).parent.glob("test_*.py"):
        assert (f"tests/gpu/{file.name}" in done.stdout) == (file.name != Path(__file__).name), file.name
