"""What a member saves after a round: one record, and the only place that knows how it lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from holdfast.engines.common.counters import Traffic, Work
from holdfast_deploy.ops.audit import BEGINNING, Head
from holdfast_deploy.storage.links import LinkDigest
from holdfast_deploy.storage.messages import Incarnations, MessageFile
from holdfast_deploy.storage.store import Store

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
        """As they are now: the original goes on counting."""
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
            "tally": links,
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
