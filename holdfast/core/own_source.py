"""A single Python file of the site's own: found and read without running it, then run from what was read.

Python itself may run something else than a file says: a compiled file in ``__pycache__`` counts in its place,
and may ask not to be compared with it (PEP 552). Whoever vouches for a source by its hash loads it from here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import ExecutionLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType

from holdfast.core.errors import HoldfastError

INSTALLED = ("site-packages", "dist-packages")  # folders where everything lies side by side


@dataclass(frozen=True)
class OwnSource:
    """The file of the module called ``module``, as it was when it was read."""

    module: str
    file: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """Of the file, as ``sha256sum`` prints it."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def classes(self) -> list[str]:
        """The names of all classes that the source defines."""
        return [node.name for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]

    @cached_property
    def _tree(self) -> ast.Module:
        try:
            return ast.parse(self.content, str(self.file))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise HoldfastError(f"{self.file}: this is not Python ({' '.join(str(error).split())})") from None

    def check_alone(self) -> None:
        """Refuses a source that imports files which lie beside it: a hash of it would say nothing of these.

        Imports are found as they stand in the source. Who imports by other means hides it from readers, too.
        """
        top, root = self.module.partition(".")[0], self.file.parents[self.module.count(".")]
        if self.file.name == "__init__.py":
            root = root.parent
        for imported in self._imports:
            first = imported.partition(".")[0]
            if first in ("", top) or (first != "holdfast" and _beside(first, root)):
                raise HoldfastError(
                    f"{self.file} imports {imported!r}, another file of its own, which its hash does not "
                    "cover; put all into one file, or install the other one as a package"
                )

    @property
    def _imports(self) -> Iterator[str]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield "." * node.level + (node.module or "")

    def run(self) -> ModuleType:
        """The module, from the very bytes that were read; of a package that it is in, nothing else runs."""
        present = sys.modules.get(self.module)
        if present is not None:
            loader = present.__spec__.loader if present.__spec__ is not None else None
            if not isinstance(loader, _FromBytes):
                raise HoldfastError(
                    f"a module {self.module!r} has been imported already, so it is not {self.file} as it was "
                    "read; give your file another name"
                )
            if loader.source == self:
                return present
        own = _FromBytes(self)
        spec = ModuleSpec(self.module, own, origin=str(self.file))
        spec.has_location = True  # so that tracebacks and ``inspect`` find the lines
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            own.exec_module(module)
        except BaseException:  # of the user's own module: what is half made must not be found again
            del sys.modules[self.module]
            raise
        return module


class _FromBytes(ExecutionLoader):
    """Runs the bytes of a source, and tells Python where they came from."""

    def __init__(self, source: OwnSource) -> None:
        self.source = source

    def get_filename(self, fullname: str) -> str:
        return str(self.source.file)

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.source.content)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source.content, str(self.source.file), "exec", dont_inherit=True)


def find_source(module: str) -> OwnSource:
    """The source of ``module`` in the current folder or the installed packages; nothing of it is run."""
    top, *inner = module.split(".")
    spec = _find_top(top)
    for depth, _ in enumerate(inner, 2):
        where = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(".".join(module.split(".")[:depth]), where) if where else None
    if spec is None:
        raise HoldfastError(f"there is no module {module!r} in the current folder or the installed packages")
    if not spec.has_location or not spec.origin or not spec.origin.endswith(".py"):
        raise HoldfastError(f"the module {module!r} has no .py file that could be read ({spec.origin})")
    file = Path(os.path.abspath(spec.origin))
    try:
        return OwnSource(module, file, file.read_bytes())
    except OSError as error:
        raise HoldfastError(f"{file} cannot be read ({error.strerror})") from None


def _find_top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name) or PathFinder.find_spec(name, [os.getcwd()])
    except (ImportError, ValueError):  # nothing that has a file, or no name at all
        return None


def _beside(name: str, root: Path) -> bool:
    """Whether the module or package ``name`` lies in the folder ``root``, where none are installed."""
    spec = _find_top(name)
    if spec is None or root.name in INSTALLED:
        return False
    places = list(spec.submodule_search_locations or [])
    if not places and spec.has_location and spec.origin is not None:
        places = [spec.origin]
    return any(Path(place).parent.resolve() == root.resolve() for place in places)
