"""Errors that a person can act on: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoldfastError(ValueError):
    """A mistake in what the user gave us. ``str(error)`` is one line, fit for a terminal."""


def unknown(kind: str, given: str, allowed: Iterable[str]) -> HoldfastError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given).lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return HoldfastError(f"unknown {kind} {given!r}: {hint}choose from {', '.join(names) or 'nothing'}")
