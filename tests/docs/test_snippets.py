"""Python on the pages of the documentation, run as printed; the pieces of a page belong together."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# python.md and data.md have tests of their own, which also look at what is printed.
PAGES = [
    *(DOCS / f"{name}.md" for name in ("index", "channels", "models", "robust", "deploy", "dspodfl-bias")),
    *(DOCS / f"{name}.md" for name in ("experiments", "membership", "privacy")),
    *sorted((DOCS / "howto").glob("*.md")),
]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_on_a_page_runs(page: Path, tmp_path: Path) -> None:
    pieces = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    program = "\n".join(pieces)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    promised = re.findall(r"print\(.*\)  # (tensor\(True\)|True)", program)
    assert done.stdout.count("True") >= len(promised)
