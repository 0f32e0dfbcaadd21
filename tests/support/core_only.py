"""Runs pytest, with the arguments given, as on a machine with the core dependencies alone."""

from __future__ import annotations

import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

# What an extra installs has the name of its module in nearly all cases.
MODULES = {"grpcio": "grpc", "flwr-datasets": "flwr_datasets", "dp-accounting": "dp_accounting"}


def extras() -> set[str]:
    """The modules that the optional dependencies of users bring."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [
        line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines
    ]
    names = [line.split(">")[0].split("[")[0] for line in wanted]
    return {MODULES.get(name, name.replace("-", "_")) for name in names} - {"holdfast_papers"}


class CoreOnly(PathFinder):
    """Finds no module of an extra."""

    absent = extras()

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.split(".")[0] in cls.absent else super().find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = CoreOnly
    sys.exit(pytest.main(sys.argv[1:]))
