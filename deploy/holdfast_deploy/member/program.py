"""What a session runs: the part of a member that knows the method."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast_deploy.member.privacy import Releases
from holdfast_deploy.storage.messages import Incarnations


class Program(Protocol):
    """What a member does in a session: a node's rounds, or a server's."""

    releases: Releases | None  # of private data, and what they cost

    def restore(self) -> None:
        """Takes up what is saved; afterwards all that is not saved, or is damaged, is computed again."""

    def run(self) -> Any:
        """Takes part, from what is saved to the end."""

    def charge(self) -> None:
        """Pays for private data; it is called before anything that may depend on them is sent or saved."""

    def may_fetch(self, who: str, message_round: int) -> bool:
        """Whether ``who`` may have this member's messages of a round."""

    def readers(self, message_round: int) -> list[str]:
        """The members that may still ask for what was published for all in a round."""

    def awaits(self, name: str, message_round: int) -> bool:
        """Whether the member, now in ``message_round``, cannot finish its rounds without ``name``."""

    def depends_on(self, known: Incarnations) -> Incarnations:
        """What a message says of the incarnations that it depends on, of all that are ``known``."""

    def figures(self) -> dict[str, Any]:
        """What the status says beside what it says of every member."""

    def hidden(self) -> dict[str, Any]:
        """What other members are told in the place of figures that are not for them."""
