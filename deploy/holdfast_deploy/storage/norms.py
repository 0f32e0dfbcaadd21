"""How large messages are, by sender: so that whoever sent nonsense is named, not whoever computed with it."""

from __future__ import annotations

from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast_deploy.storage.messages import MessageFile


class AbsurdError(HoldfastError):
    """A message is far larger than any that was seen before; it is not used."""


class Norms:
    """Euclidean norms of the messages that the member called ``name`` has sent and received.

    ``limit``: how many times larger than all before a message may be.
    """

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit
        self.largest = 0.0  # of all that was accepted
        self.latest: dict[str, tuple[int, float]] = {}  # by sender: the round and the norm

    def sent(self, message: MessageFile) -> None:
        """Notes one of our own."""
        self._note(self.name, message)

    def received(self, peer: str, message: MessageFile) -> None:
        """Notes what ``peer`` sent; complains if it cannot be meant."""
        if 0.0 < self.largest * self.limit < message.norm:
            raise AbsurdError(
                f"{peer} sent a message of norm {message.norm:.3g} in round {message.header.round}; the "
                f"largest before, anybody's, was {self.largest:.3g}. It was not used, and all is saved. Ask "
                f"{peer}: if it is right, raise limits.outlier; if not, roll everybody back to round "
                f"{max(message.header.round - 1, 0)} (holdfast federation rollback)"
            )
        self._note(peer, message)

    def _note(self, sender: str, message: MessageFile) -> None:
        if message.header.tensors:  # a farewell has none
            self.largest = max(self.largest, message.norm)
            self.latest[sender] = (message.header.round, message.norm)

    def suspicion(self) -> str:
        """Why a number became infinite, as far as the norms tell."""
        others = {peer: norm for peer, (_, norm) in self.latest.items() if peer != self.name}
        own = self.latest.get(self.name, (0, 0.0))[1]
        shown = ", ".join(f"{peer} {norm:.3g}" for peer, norm in [(self.name, own), *sorted(others.items())])
        worst = max(others, key=lambda peer: others[peer], default="")
        if worst and others[worst] > 1e3 * max([own, *(n for p, n in others.items() if p != worst)]):
            return (
                f"{worst} sent by far the largest numbers: ask {worst} (norms of the last messages: {shown})"
            )
        return f"no member's messages stand out (norms of the last: {shown}): try a smaller lr"

    def status(self) -> dict[str, dict[str, float]]:
        """The latest of each member, for people."""
        return {name: {"round": round, "norm": norm} for name, (round, norm) in dict(self.latest).items()}

    def notes(self) -> dict[str, Any]:
        """For the state's header."""
        return {"largest": self.largest}

    def restore(self, notes: dict[str, Any]) -> None:
        """What ``notes`` gave when the state was saved."""
        self.largest = notes.get("largest", 0.0)
        self.latest = {}
