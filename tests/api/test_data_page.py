"""The Python of docs/data.md, run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("code", SNIPPETS, ids=["name", "datasets", "own", "augment", "stream", "frame"])
def test_snippets_print_what_is_stated(code: str, tmp_path: Path) -> None:
    running = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert running.returncode == 0, running.stderr
    assert running.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
