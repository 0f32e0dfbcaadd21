"""Runs pytest, with the arguments given, as on a machine with the core dependencies and pytest alone."""

from __future__ import annotations

import sys
import tomllib
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def needed() -> set[str]:
    """The distributions that the core dependencies and pytest bring, themselves included."""
    waiting = ["pytest", *tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]]
    found: set[str] = set()
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(name)
            try:
                waiting += requires(name) or []
            except PackageNotFoundError:  # not on this machine, or in this version of Python
                continue
    return found


def absent() -> set[str]:
    """The modules here that only other distributions bring."""
    core = needed()
    return {
        module
        for module, brought_by in packages_distributions().items()
        if not {canonicalize_name(name) for name in brought_by} & core
    } - {"holdfast", "holdfast_papers"}


class CoreOnly(PathFinder):
    """Finds no module that has to be absent."""

    absent = absent()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in cls.absent else super().find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = CoreOnly
    sys.exit(pytest.main(sys.argv[1:]))
