"""Running digests of what passed over each link, which both of its ends compare.

Whoever has stolen a member's key can answer in its name, and each of its messages looks right by itself. But
the member itself knows what it has sent. So every question and every answer says what has passed over the
link up to the last rounds, by direction, and the other end compares that with what it has seen. A round is
compared once both ends have finished it; what nobody asked about any more is compared in the farewells.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.storage.incarnations import START_ANEW
from holdfast_deploy.storage.messages import UNSEALED, Digest, Number

KEPT = 4  # rounds that are remembered; the ends of a link are at most two apart, unless it is sporadic


class ForgedError(HoldfastError):
    """Somebody served other messages in a member's name: both ends stop."""

    exit_code = REFUSED


class PutBackError(HoldfastError):
    """A member's folder is older than what others have had from it, such as one from a backup."""

    exit_code = REFUSED

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} was put back, to an old backup perhaps: {why}. Put back its newest folder; or roll "
            "everybody back (holdfast federation rollback); or take it in anew with an empty folder "
            f"(holdfast federation replace), if it is a node and members may change; or {START_ANEW}"
        )


class Passed(BaseModel):
    """What has passed over a link from the beginning to the end of a round, seen from one end."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    round: Number
    sent: Digest = UNSEALED  # chains of the messages' content
    received: Digest = UNSEALED


class Tally:
    """What the member ``name`` has seen pass, by peer. The computing thread adds, the event loop reads.

    ``finished`` is the last round of which all messages have passed.
    """

    def __init__(self, name: str, finished: Callable[[], int] = lambda: 0, first: int = 0) -> None:
        self.name, self.finished, self.first = name, finished, first
        self.links: dict[str, tuple[Passed, ...]] = {}  # the newest last
        self.forgotten: set[str] = set()  # over whose links something passed that is not known any more
        # By how many rounds others may be further than the one under way; any, until a state is taken up.
        self.slack = math.inf

    def add(self, peer: str, round: int, *, sent: Iterable[str] = (), received: Iterable[str] = ()) -> None:
        """Messages of ``round``, by their content; its exchanges come one after the other."""
        if peer in self.forgotten:
            return
        known = self.links.get(peer, ())
        last = known[-1] if known else Passed(round=round)
        before = tuple(passed for passed in known if passed.round < round)
        now = Passed(round=round, sent=_chain(last.sent, sent), received=_chain(last.received, received))
        self.links[peer] = (*before, now)[-KEPT:]

    def forget(self, peer: str) -> None:
        """From here on, nothing is said about the link to ``peer``."""
        self.forgotten.add(peer)
        self.links.pop(peer, None)

    def told(self, peer: str) -> list[Passed]:
        """What ``peer`` is told. The ``first`` stage has no end that others know of; the next includes it."""
        done = self.finished()
        return [passed for passed in self.links.get(peer, ()) if self.first < passed.round <= done]

    def compare(self, peer: str, theirs: list[Passed]) -> None:
        """Complains if ``peer`` saw something else than this member, in a round that both have finished."""
        rounds = {passed.round: passed for passed in theirs}
        for ours in self.told(peer):
            if (other := rounds.get(ours.round)) is not None:
                self._same(ours.round, self.name, peer, ours.sent, other.received)
                self._same(ours.round, peer, self.name, other.sent, ours.received)

    def require_newest(self, peer: str, theirs: list[Passed]) -> None:
        """Complains if this member was put back: ``peer``, who asks, has had messages of later rounds.

        Not if ``peer`` is asked: a server tells also what it has published, and nobody has fetched yet.
        """
        done, furthest = self.finished(), max((passed.round for passed in theirs), default=0)
        if furthest > done + 1 + self.slack:
            why = f"{peer} has its messages up to round {furthest}, and its folder ends with round {done}"
            raise PutBackError(self.name, why)

    @staticmethod
    def _same(round: int, sender: str, receiver: str, sent: str, received: str) -> None:
        if sent != received:
            raise ForgedError(
                f"up to round {round}, {receiver} received other messages from {sender} than {sender} sent: "
                f"somebody else answers as {sender}, with its key. Give {sender} a new key (csr, sign "
                "--replace), and roll everybody back to before (holdfast federation rollback)"
            )

    def notes(self) -> dict[str, Any]:
        """For the state's header."""
        notes: dict[str, Any] = {peer: [p.model_dump() for p in known] for peer, known in self.links.items()}
        return notes | dict.fromkeys(self.forgotten)

    def restore(self, notes: dict[str, Any]) -> None:
        """What ``notes`` gave when the state was saved."""
        self.forgotten = {peer for peer, known in notes.items() if known is None}
        self.links = {
            peer: tuple(Passed.model_validate(passed) for passed in known)
            for peer, known in notes.items()
            if known is not None
        }


def _chain(before: str, contents: Iterable[str]) -> str:
    for content in contents:
        before = hashlib.sha256(f"{before}{content}".encode()).hexdigest()
    return before
