"""Importing what a user names as ``module:attribute``.

Only for names in the user's own files: whoever writes the name chooses the code that runs.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.validation import check_arguments, quoted


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


def make_own(kind: str, spec: str, given: Mapping[str, Any], *bases: type) -> Any:
    """The instance of one of ``bases`` that ``spec`` names, or one of the class it names, with ``given``."""
    found = import_named(kind, spec, f"my_module:My{kind.capitalize()}")
    if inspect.isclass(found) and issubclass(found, bases):
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise HoldfastError(f"{kind} {spec!r}: the class lacks {', '.join(missing)}")
        return found(**check_arguments(f"{kind} {spec!r}", found, given))
    if not isinstance(found, bases):
        names = " or ".join(base.__name__ for base in bases)
        raise HoldfastError(
            f"{kind} {spec!r}: expected a subclass or an instance of {names}, got {quoted(found)}"
        )
    if given:
        raise HoldfastError(f"{kind} {spec!r}: it is made already; leave out {', '.join(given)}")
    return found
