"""The modules of ``holdfast_deploy`` know one another in one direction only, types included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

import holdfast_deploy

# Modules that still import one another in a circle. None is added, and those that are out of it go from here.
STILL = {
    *("federation_file", "private_federation"),
}


def imported(path: Path) -> Iterator[str]:
    """Names that a module imports, wherever in it, also for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(folder: Path, package: str) -> list[set[str]]:
    """Modules in ``folder`` that import one another; their names without ``package``."""
    paths = {".".join(path.relative_to(folder).with_suffix("").parts): path for path in folder.rglob("*.py")}
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in paths.items():
        for target in imported(path):
            if (known := target.removeprefix(f"{package}.")) in paths and known != name:
                graph.add_edge(name, known)
    return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_no_module_imports_one_that_imports_it() -> None:
    (folder,) = holdfast_deploy.__path__
    for circle in circles(Path(folder), "holdfast_deploy"):
        assert circle <= STILL, sorted(circle - STILL)


def test_no_module_of_a_member_or_its_folder_needs_imports_for_types_only() -> None:
    """One that did would name what is built on it: a session knows no method, a round knows no session."""
    (folder,) = holdfast_deploy.__path__
    paths = [path for room in ("member", "storage") for path in (Path(folder) / room).glob("*.py")]
    assert not [str(path) for path in paths if "TYPE_CHECKING" in path.read_text()]


def test_imports_for_types_and_within_functions_count(tmp_path: Path) -> None:
    (tmp_path / "rooms").mkdir()
    texts = {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.rooms.b import B\n",
        "rooms/b.py": "def f():\n    import package.c\n",
        "c.py": "from package import a\n",
        "d.py": "from package import a, c\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert circles(tmp_path, "package") == [{"a", "rooms.b", "c"}]
