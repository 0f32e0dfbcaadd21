"""What passes between members: of which run it is, over which link it went, and how large it is.

A member draws a random number when its folder is begun: its incarnation. It saves the number before anything
is sent, and keeps it as long as the folder. Every message lists the incarnations that it depends on: its
sender's, and those behind the messages that its sender had received. The saved state lists them, too. A
member that meets another incarnation than the one its own state depends on thus knows that two runs are
mixed: some members have started again in empty folders while others continued from theirs. It knows this even
if the member that started again is not a neighbour.

Over each link, both ends keep running digests of the messages. A thief of a member's key can answer in its
name, and each of its messages looks right by itself. But the member itself knows what it has sent. So every
question and every answer says what has passed over the link up to the last rounds, by direction, and the
other end compares that with what it has seen. A round is compared once both ends have finished it; what
nobody asked about any more is compared in the final messages.

The norms of messages, by sender, name the member that sent nonsense instead of those that computed with it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping

from pydantic import BaseModel, ConfigDict

from holdfast.core.errors import REFUSED, HoldfastError
from holdfast_deploy.storage.messages import UNSEALED, Digest, Incarnations, MessageFile, Number

START_ANEW = "stop all members, delete all their folders, and start all of them anew"


class MixedRunsError(HoldfastError):
    """The members called ``names`` have started again in empty folders while others continued."""

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


class LinkDigest(BaseModel):
    """What has passed over a link from the beginning to the end of a round, seen from one end."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    round: Number
    sent: Digest = UNSEALED  # chains of the messages' content
    received: Digest = UNSEALED


class LinkDigests:
    """What the member ``name`` has seen pass, by peer. The computing thread adds, the event loop reads.

    ``finished`` is the last round of which all messages have passed.
    """

    def __init__(self, name: str, finished: Callable[[], int] = lambda: 0, first: int = 0) -> None:
        self.name, self.finished, self.first = name, finished, first
        self.links: dict[str, tuple[LinkDigest, ...]] = {}  # the newest last
        self.forgotten: set[str] = set()  # over whose links something passed that is not known any more
        # By how many rounds others may be further than the one under way; any, until a state is taken up.
        self.slack = math.inf

    def add(self, peer: str, round: int, *, sent: Iterable[str] = (), received: Iterable[str] = ()) -> None:
        """Messages of ``round``, by their content; its exchanges come one after the other."""
        if peer in self.forgotten:
            return
        known = self.links.get(peer, ())
        last = known[-1] if known else LinkDigest(round=round)
        before = tuple(passed for passed in known if passed.round < round)
        now = LinkDigest(round=round, sent=_chain(last.sent, sent), received=_chain(last.received, received))
        self.links[peer] = (*before, now)[-KEPT:]

    def forget(self, peer: str) -> None:
        """From here on, nothing is said about the link to ``peer``."""
        self.forgotten.add(peer)
        self.links.pop(peer, None)

    def report(self, peer: str) -> list[LinkDigest]:
        """For ``peer``. The ``first`` message round has no end that others know of; the next includes it."""
        done = self.finished()
        return [passed for passed in self.links.get(peer, ()) if self.first < passed.round <= done]

    def compare(self, peer: str, theirs: list[LinkDigest]) -> None:
        """Complains if ``peer`` saw something else than this member, in a round that both have finished."""
        rounds = {passed.round: passed for passed in theirs}
        for ours in self.report(peer):
            if (other := rounds.get(ours.round)) is not None:
                self._same(ours.round, self.name, peer, ours.sent, other.received)
                self._same(ours.round, peer, self.name, other.sent, ours.received)

    def require_newest(self, peer: str, theirs: list[LinkDigest]) -> None:
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

    def state(self) -> dict[str, tuple[LinkDigest, ...] | None]:
        """What is saved: by peer; None for a link over which something passed that is not known any more."""
        return {**self.links, **dict.fromkeys(self.forgotten)}

    def restore(self, saved: Mapping[str, tuple[LinkDigest, ...] | None]) -> None:
        """What ``state`` gave when it was saved."""
        self.forgotten = {peer for peer, known in saved.items() if known is None}
        self.links = {peer: known for peer, known in saved.items() if known is not None}


def _chain(before: str, contents: Iterable[str]) -> str:
    for content in contents:
        before = hashlib.sha256(f"{before}{content}".encode()).hexdigest()
    return before


class ImplausibleMessageError(HoldfastError):
    """A message is far larger than any that was seen before; it is not used."""


class MessageNorms:
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
            raise ImplausibleMessageError(
                f"{peer} sent a message of norm {message.norm:.3g} in round {message.header.round}; the "
                f"largest before, anybody's, was {self.largest:.3g}. It was not used, and all is saved. Ask "
                f"{peer}: if it is right, raise limits.outlier; if not, roll everybody back to round "
                f"{max(message.header.round - 1, 0)} (holdfast federation rollback)"
            )
        self._note(peer, message)

    def _note(self, sender: str, message: MessageFile) -> None:
        if message.header.tensors:  # a final message has none
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

    def restore(self, largest: float) -> None:
        """What ``largest`` was when the state was saved."""
        self.largest, self.latest = largest, {}
