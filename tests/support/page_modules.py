"""Scripts of docs/ as modules: they are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def script(path: str) -> ModuleType:
    """The script at ``path`` in docs/, imported."""
    found = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
