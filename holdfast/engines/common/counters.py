"""What a method costs, and what a run has sent and computed so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from holdfast.core.tree import row_bits, row_size


@dataclass(frozen=True)
class Footprint:
    """Multiples of the model's dimension d, except for gradients."""

    vectors_at_start: float  # sent over the whole network before the first round
    vectors_per_round: float  # sent over the whole network in a round
    vectors_per_link: float  # the same, per directed link
    scalars_per_round: float  # single numbers sent beside them; negative where a part of a vector is not sent
    state_vectors: float  # kept by all nodes together between rounds
    gradients_per_round: float  # per node
    minibatches_per_round: float  # of these, gradients of minibatches; the others are of all data

    def memory(self, nodes: int, dim: int, itemsize: int) -> float:
        """Estimated bytes of state, messages and three working copies of all rows, and of the model."""
        rows = self.state_vectors + (self.vectors_per_link + 3) * nodes
        model_copies = 4
        return (rows + model_copies) * dim * itemsize


@dataclass
class Traffic:
    """What has been sent so far."""

    numbers: int = 0  # in the messages, each counted once per receiver
    bits: int = 0  # that they took on the wire
    delay: float = 0.0  # DSpodFL's tau_trans: 1 for every vector [d] that all links carry
    raw_delay: float = 0.0  # the same in its own unit: 1/b_ij, averaged over links and then over nodes

    def count(self, receivers: int, message: Any, wire: Any) -> None:
        """Counts one row of ``message``, which travels as ``wire``, to so many ``receivers``."""
        self.numbers += receivers * row_size(message)
        self.bits += receivers * row_bits(wire)

    def count_delay(self, vectors: float, link_time: float) -> None:
        """Counts so many ``vectors`` over all links, each of which takes ``link_time``."""
        self.delay += vectors
        self.raw_delay += vectors * link_time

    @classmethod
    def of(cls, counts: dict[str, Any], itemsize: int) -> Self:
        """From saved ``counts``; older ones say only how many numbers, each of ``itemsize`` bytes."""
        return cls(**{"bits": 8 * itemsize * counts["numbers"], **counts})


@dataclass
class Work:
    """What has been computed so far, over all nodes."""

    gradient_evaluations: int = 0  # one per node, call and point
    sample_gradients: int = 0  # samples those evaluations read
    delay: float = 0.0  # DSpodFL's tau_proc: 1 for every gradient that all nodes compute
    raw_delay: float = 0.0  # the same in its own unit: 1/d_i, averaged over all nodes
    value_evaluations: int = 0  # by solvers, one per node and point: no gradient, so not counted as one
    unfinished_solves: int = 0  # local solves that ended before their tolerance was met, one per node


@dataclass
class Accesses:
    """How often the data of a node that takes part are looked at; see ``holdfast.privacy``."""

    minibatches: int = 0  # one for each, at however many points; batches may be all data
    of_all_data: int = 0


@dataclass
class Counters:
    """All of them."""

    traffic: Traffic = field(default_factory=Traffic)
    work: Work = field(default_factory=Work)
    accesses: Accesses = field(default_factory=Accesses)

    def add(self, other: Counters) -> None:
        """Adds what ``other`` has counted."""
        for mine, theirs in (
            (self.traffic, other.traffic),
            (self.work, other.work),
            (self.accesses, other.accesses),
        ):
            for name, amount in vars(theirs).items():
                setattr(mine, name, getattr(mine, name) + amount)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, counts: dict[str, Any], itemsize: int) -> Self:
        """The inverse of ``as_dict``; other keys are ignored."""
        accesses = Accesses(**counts.get("accesses", {}))
        return cls(Traffic.of(counts["traffic"], itemsize), Work(**counts["work"]), accesses)
