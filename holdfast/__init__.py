"""holdfast: federated learning that does not drift.

Names are imported when first used, so that ``import holdfast`` costs nothing. Which there are, and where each
is found, is stated once, in ``__init__.pyi``: this module reads it as type checkers and editors do.
"""

from __future__ import annotations

import sys
from importlib import import_module

__version__ = "0.2.0"

_HOMES: dict[str, str] = {}  # the module of every name
with open(f"{__file__}i", encoding="utf-8") as _stub:
    for _line in _stub:
        match _line.split():
            case ["from", _module, "import", _name, "as", _]:
                _HOMES[_name] = _module

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        # With these two, Python adds the nearest name to what it prints.
        raise AttributeError(
            f"module 'holdfast' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
