"""Notebooks run from top to bottom; they are committed with what they printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_six() -> None:
    assert len(NOTEBOOKS) == 6


def test_the_site_lists_them_all() -> None:
    listed = re.findall(r"learn/([\w-]+)\.ipynb", (ROOT / "mkdocs.yml").read_text())
    assert listed == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_committed(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert kinds, "run it before committing it"
    assert "error" not in kinds


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_where_holdfast_is_missing_it_installs_the_wheel_beside_it(path: Path) -> None:
    """Never by name: the package index has another project called holdfast."""
    words, install = nbformat.read(path, as_version=4).cells[:2]
    assert re.search("wheels? (of .* )?that `make dist` builds", words.source)
    assert re.findall(r"%pip .*", install.source) == re.findall(
        r"%pip install --quiet \{wheels\[0\]\}(?:\[\w+\]| \{wheels\[1\]\})?", install.source
    )
    assert "%pip" in install.source


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever runs a notebook has the environment of its kernel active: cells call the command.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()


def test_a_federation_is_shown_as_the_command_shows_it_now() -> None:
    text = (ROOT / "notebooks" / "5-federation.ipynb").read_text()
    assert re.search(r"wrote federation.toml: 3 nodes, fingerprint (?:[0-9a-f]{4}:){7}[0-9a-f]{4}", text)
