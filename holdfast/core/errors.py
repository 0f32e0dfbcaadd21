"""Errors that a person can act on: what was given, what was expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit codes of commands, as in sysexits.h. 0: done; 130: stopped by a signal.
MISCONFIGURED = 2  # something that was given has to be changed
DAMAGED = 65  # files are not as they were written
TRY_LATER = 75  # the same command, later
REFUSED = 77  # by this site, or by another member


LONGEST_NAME = 100  # characters of an unknown one that are quoted


class HoldfastError(ValueError):
    """A mistake in what the user gave us. ``str(error)`` is one line, fit for a terminal."""

    exit_code = MISCONFIGURED  # of the command that it ends

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    r"""``text`` as one line that does nothing to a terminal: control characters become such as ``\x1b``.

    Files and other members may put anything into a message: colours, moves of the cursor, reversed text.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unknown(kind: str, given: str, allowed: Iterable[str], meant: str | None = None) -> HoldfastError:
    """An error for a name that does not exist, with the one that is ``meant``, or the nearest that does."""
    names, shown = sorted(allowed), repr(given)
    shown = shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."
    hint = did_you_mean(given[:LONGEST_NAME], names) if meant is None else f"did you mean {meant}? "
    return HoldfastError(f"unknown {kind} {shown}: {hint}choose from {', '.join(names) or 'nothing'}")


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question with a space behind it; "" if none is near."""
    near = difflib.get_close_matches(str(given).lower(), list(names), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
