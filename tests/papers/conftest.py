"""A made-up paper among the others, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_paper import tiny_paper

from holdfast_papers.base import Paper
from holdfast_papers.catalogue import PAPERS


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    (tmp_path / "package").mkdir()
    tiny = tiny_paper(tmp_path / "package")
    monkeypatch.setitem(PAPERS, "tiny", tiny)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("HOLDFAST_DATA", raising=False)
    return tiny
