"""Pages of the site that are written from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    found = importlib.util.spec_from_file_location("hooks", Path(__file__).parents[2] / "docs" / "hooks.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_every_command_is_there(hooks: ModuleType) -> None:
    page = hooks.commands()
    for heading in ("run", "resume", "list", "new project", "node", "federation try"):
        assert f"\n## holdfast {heading}\n" in page
    assert "| `--runs-dir` | Where the run directory is made. |" in page


def test_types_are_words(hooks: ModuleType) -> None:
    page = hooks.experiment_keys()
    assert "| `evaluate_every` | whole number or `'auto'` | `1` | rounds between measurements" in page
    assert "| `mixing` | a name, or a table with a name | none |" in page
    assert "Union[" not in page
