"""Models of the tests, as ``--model`` takes them: from a file that nobody has imported."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest


def as_own_model(kind: type, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What to give to ``--model`` for the class ``kind``: a copy of its source, in ``folder``.

    Its own module has been imported by the tests, and members run no file but as they have read it.
    """
    name = f"own_{kind.__module__}"
    source = inspect.getsource(sys.modules[kind.__module__])
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    sys.modules.pop(name, None)  # the copy of an earlier test
    monkeypatch.syspath_prepend(folder)
    return f"{name}:{kind.__name__}"
