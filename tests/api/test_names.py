"""What ``import holdfast`` offers: the same to Python, to type checkers and to editors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf

SOURCE = Path(hf.__file__)


def type_check(folder: Path, code: str) -> str:
    """What mypy says about ``code``; only this and holdfast/__init__.py are read, which takes a second."""
    (folder / "use.py").write_text(code)
    found = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip"),
            *("--cache-dir", str(folder / "cache"), "use.py", str(SOURCE)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert found.returncode in (0, 1), found.stderr
    return found.stdout


def test_type_checkers_know_which_names_there_are(tmp_path: Path) -> None:
    assert type_check(tmp_path, "import holdfast as hf\nhf.FedAvg\n").startswith("Success")
    assert 'use.py:2: error: Module has no attribute "FedAVG"' in type_check(
        tmp_path, "import holdfast as hf\nhf.FedAVG\n"
    )


def test_typed_names_are_the_lazy_ones() -> None:
    [block] = [
        node
        for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    typed = {(alias.asname, node.module) for node in imports for alias in node.names}
    assert typed == set(hf._HOME_OF.items())


@pytest.mark.parametrize("name", hf.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(hf, name) is not None
    assert name in dir(hf)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'FedAVG'"):
        _ = hf.FedAVG
