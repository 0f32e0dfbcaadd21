"""Whether all members are in the same run, or one started anew while others went on from their folders.

A member draws a random number when its folder is begun: its incarnation. It saves the number before anything
is sent, and keeps it as long as the folder. Every message lists the incarnations that it depends on: its
sender's, and those behind the messages that its sender had received. The saved state lists them, too. A
member that meets another incarnation than the one its own state depends on thus knows that two runs are
mixed, even if the member that started anew is not a neighbour.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from holdfast.core.errors import HoldfastError
from holdfast_deploy.storage.messages import Incarnations

START_ANEW = "stop all members, delete all their folders, and start all of them anew"


class MixedRunsError(HoldfastError):
    """The members called ``names`` have started anew while others went on."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        shown = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
        super().__init__(
            f"two runs are mixed: {shown} started anew in an empty folder while others went on from theirs. "
            f"Put back the old folder of {shown} and start the same command again; or {START_ANEW}"
        )


def new_incarnation() -> str:
    """A number that no other folder has."""
    return secrets.token_hex(8)


class Dependencies:
    """The incarnations that a member's state and messages depend on, its own among them."""

    def __init__(self, name: str, own: str, members: Iterable[str]) -> None:
        self.members = frozenset(members)
        self.known: Incarnations = {name: own}

    def check(self, others: Incarnations) -> None:
        """Complains if what depends on ``others`` is of another run than what depends on ours."""
        if strangers := sorted(others.keys() - self.members):
            raise HoldfastError(f"depends_on: {strangers[0]!r} is not a member of the federation")
        known = self.known
        if mixed := sorted(name for name in others if known.get(name, others[name]) != others[name]):
            raise MixedRunsError(mixed)

    def add(self, others: Incarnations) -> None:
        """From here on, what this member computes may depend on ``others``."""
        self.check(others)
        if not others.keys() <= self.known.keys():
            self.known = {**self.known, **others}  # in one step: the computing thread may be reading it
