"""What a round gets: the state that is saved after each, its context, and its way to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from holdfast.engines.common.channel_run import ChannelRun
from holdfast.engines.common.counters import Traffic, Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.topology import Network
from holdfast_deploy.ops.audit import BEGINNING, Head
from holdfast_deploy.storage.links import LinkDigest
from holdfast_deploy.storage.messages import ExchangeKey, Incarnations, MessageFile, TensorSpec
from holdfast_deploy.storage.store import Store

T = TypeVar("T")

EMPTY = Head(0, BEGINNING)  # of an audit log without lines

Passed = Mapping[str, tuple[LinkDigest, ...] | None]  # by peer; None: not known any more


@dataclass
class Costs:
    """What taking part has cost so far."""

    traffic: Traffic = field(default_factory=Traffic)  # in messages sent, each counted once
    seconds: float = 0.0  # in all
    waiting: float = 0.0  # of these, spent on exchanges
    saving: float = 0.0  # and on writing down states
    wire_sent: int = 0  # bytes of messages that went out before this process began
    wire_received: int = 0  # and came in
    delivery_bytes: int = 0  # the finished model, handed out by a server

    def copy(self) -> Costs:
        """As they are now: the original continues to count."""
        return replace(self, traffic=replace(self.traffic))


class Handover:
    """A tree of tensors that is moved: once it is taken, only the taker holds it, and can let go of it.

    A round that gets its state in this way may free parts of it while it computes, although its callers still
    have the record that the state came in. With models of several GB that decides how many fit.
    """

    def __init__(self, tree: Any) -> None:
        self._trees = [tree]

    @property
    def tree(self) -> Any:
        """A look at it; it stays here."""
        (tree,) = self._trees
        return tree

    @property
    def taken(self) -> bool:
        """Whether it is elsewhere."""
        return not self._trees

    def take(self) -> Any:
        """Hands it over."""
        return self._trees.pop()


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """All that a member saves after a round. Nothing else of the round survives it."""

    round: int  # how many are done
    method: Handover  # the method's state, with what its channel remembers
    work: Work | None = None  # None: of a server, which computes no gradients
    metrics: Mapping[str, float] = field(default_factory=dict)  # the latest
    costs: Costs = field(default_factory=Costs)
    links: Passed = field(default_factory=dict)
    largest_norm: float = 0.0  # of all messages so far
    depends_on: Incarnations = field(default_factory=dict)
    audit: Head = EMPTY  # the last line of the audit log that is on disk
    releases: int | None = None  # of private data, paid for so far; None: there is no budget

    def write(self, store: Store) -> None:
        """Puts it on disk; the state before remains there as ``state.previous``."""
        store.save_state(self.round, self.method.tree, self.to_notes(), self.depends_on)

    def to_notes(self) -> dict[str, Any]:
        """All but the tensors and the incarnations, for the header of the file."""
        own = {} if self.work is None else {"work": vars(self.work), "metrics": self.metrics}
        links = {
            peer: None if passed is None else [digest.model_dump() for digest in passed]
            for peer, passed in self.links.items()
        }
        spent = {} if self.releases is None else {"releases": self.releases}
        return {
            **own,
            "costs": asdict(self.costs),
            "tally": links,  # the names on disk of ``links`` and ``largest_norm``
            "norms": {"largest": self.largest_norm},
            "audit": self.audit,
            **spent,
        }

    @classmethod
    def read(cls, file: MessageFile, like: Any, x0: Tensor) -> MemberState:
        """What ``write`` wrote; ``like``: a tree like the method's, on the device "meta"; ``x0``: a model."""
        return replace(cls.of_notes(file, x0), method=Handover(file.read(like, x0.device)))

    @classmethod
    def of_notes(cls, file: MessageFile, x0: Tensor) -> MemberState:
        """``read`` without the method's state."""
        notes, itemsize = file.header.notes, x0.element_size()
        return cls(
            # A member that was put back to a later round than that of its state was idle between.
            round=max(file.header.round, notes.get("rolled_back", 0)),
            method=Handover(None),
            work=Work(**notes["work"]) if "work" in notes else None,
            metrics=notes.get("metrics", {}),
            costs=Costs(**{**notes["costs"], "traffic": Traffic.of(notes["costs"]["traffic"], itemsize)}),
            links={
                peer: None if known is None else tuple(LinkDigest.model_validate(one) for one in known)
                for peer, known in notes["tally"].items()
            },
            largest_norm=notes["norms"].get("largest", 0.0),
            depends_on=file.header.depends_on,
            audit=Head(*notes["audit"]),
            releases=notes.get("releases"),
        )


class Exchange(Protocol):
    """The only way in which a round touches other members and the disk.

    All calls block. They raise ``Stopped`` where the member is to stop, ``LeftOut`` where the server
    continues without it, and a ``DamagedError`` where a file of its own is not as it was written.
    """

    phase: str  # what is done at the moment, for people

    def publish(self, key: ExchangeKey, tree: Any, to: str = "") -> MessageFile:
        """Puts a message into the outbox, where ``to``, or every member that may ask, can fetch it.

        Nobody can ask a client, which has no port: what it publishes is kept, and leaves by ``submit``.
        """

    def published(self, key: ExchangeKey) -> MessageFile | None:
        """What was published for all, perhaps before a crash."""

    def keep(self, name: str, key: ExchangeKey, tree: Any) -> MessageFile:
        """Writes a message into the file ``name`` of the own folder, which no other member may fetch."""

    def fetch(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        """Their messages, as soon as all are here; refuses those that are implausibly large."""

    def fetch_available(
        self, key: ExchangeKey, peers: Sequence[str], tensors: list[TensorSpec]
    ) -> dict[str, MessageFile]:
        """``fetch`` over sporadic links: only of those where it worked out, at both ends alike."""

    def submit(self, message: MessageFile) -> None:
        """Brings a published message to the server, and returns when it is safe there.

        A server that leads may then forget the model that the round began with. So the state after the round
        is saved first.
        """

    def collect(self, key: ExchangeKey) -> dict[str, MessageFile]:
        """At a server: what its clients sent, as soon as all that count are here, in the nodes' order."""

    def checked(self, files: dict[str, MessageFile]) -> dict[str, MessageFile]:
        """What was collected, if it is as it came; refuses what is implausibly large."""

    def exchanged(self, peer: str, round: int, sent: Sequence[str], received: Sequence[str]) -> None:
        """Notes the content of what has passed over a link: both of its ends compare that later."""

    def intact(self, own: MessageFile) -> MessageFile:
        """A published message, which may have been on disk for long, read again and checked."""

    def retry_while_full(self, action: Callable[[], T]) -> T:
        """What ``action`` returns; while there is no room for its files, it is tried again from the start."""


@dataclass(frozen=True)
class RoundContext:
    """What a node's round gets beside the state."""

    round: int  # of the method, from 0
    message_round: int  # of its messages
    node: int
    names: Sequence[str]  # of all nodes
    server: str  # its name, where there is one
    network: Network
    seed: int
    like: Tensor  # a model [d], or only what it is like: number type and device
    channel_run: ChannelRun
    oracle: BatchOracle
    traffic: Traffic  # which counts what the round sends
