"""Importing what a user names as ``module:Class``.

Only for names in the user's own files: whoever writes the name chooses the code that runs.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from holdfast.core.errors import HoldfastError, unknown


def import_named(kind: str, spec: str, example: str) -> Any:
    """What ``spec``, such as ``example``, points to in the current folder or the installed packages."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise HoldfastError(f"{kind} {spec!r}: expected module:Class, for example {example}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not search the current folder by itself
    try:
        module = import_module(module_name)
    except Exception as error:
        raise HoldfastError(
            f"{kind} {spec!r}: cannot import {module_name!r} in the current folder or the installed packages "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"name in module {module_name!r}", attribute, public)
    return getattr(module, attribute)
