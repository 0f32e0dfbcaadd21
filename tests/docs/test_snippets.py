"""Python on the pages of the documentation, run as printed; the pieces of a page belong together."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

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


OBJECT = re.compile(r"`(hf\.[A-Z]\w*\([^`]*\))`")


def objects(page: Path) -> list[str]:
    """The objects in the text of ``page``, such as `hf.TopK(0.05)`, with all that they need."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [" ".join(code.split()) for code in OBJECT.findall(text)]
    return [code for code in found if _is_whole(ast.parse(code))]


def _is_whole(tree: ast.AST) -> bool:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    dots = any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(tree))
    return names == {"hf"} and not dots


WITH_OBJECTS = [page for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))] if objects(page)]


@pytest.mark.parametrize("page", WITH_OBJECTS, ids=lambda page: page.stem)
def test_the_objects_in_a_text_can_be_made(page: Path) -> None:
    for code in objects(page):
        eval(code, {"hf": hf})


def test_objects_are_found_in_lines_and_across_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`hf.TopK(0.1)`, `hf.TopK(share)`, `hf.FedAvg(lr=...)`\n```\n`hf.TopK(0.2)`\n```\n`hf.TopK(\n0.3)`"
    )
    assert objects(page) == ["hf.TopK(0.1)", "hf.TopK( 0.3)"]
