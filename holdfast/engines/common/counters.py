"""What a run has sent and computed so far."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass
class Traffic:
    """What has been sent so far."""

    numbers: int = 0  # each counted once per message
    delay: float = 0.0  # DSpodFL's tau_trans: 1 for every vector [d] that all links carry


@dataclass
class Work:
    """What has been computed so far, over all nodes."""

    gradient_evaluations: int = 0  # one per node, call and point
    sample_gradients: int = 0  # samples those evaluations read
    delay: float = 0.0  # DSpodFL's tau_proc: 1 for every gradient that all nodes compute
    value_evaluations: int = 0  # by solvers, one per node and point: no gradient, so not counted as one
    unfinished_solves: int = 0  # local solves that ended before their tolerance was met, one per node


@dataclass
class Counters:
    """Both."""

    traffic: Traffic = field(default_factory=Traffic)
    work: Work = field(default_factory=Work)

    def add(self, other: Counters) -> None:
        """Adds what ``other`` has counted."""
        for mine, theirs in ((self.traffic, other.traffic), (self.work, other.work)):
            for name, amount in vars(theirs).items():
                setattr(mine, name, getattr(mine, name) + amount)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, counts: dict[str, Any]) -> Self:
        """The inverse of ``as_dict``; other keys are ignored."""
        return cls(Traffic(**counts["traffic"]), Work(**counts["work"]))
