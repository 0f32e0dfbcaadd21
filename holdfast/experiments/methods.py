"""Methods as a run has them: under a name, with local steps that may be counted in passes over data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any, Literal

import numpy as np

from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import parameters
from holdfast.experiments.choices import as_method, own_epochs
from holdfast.experiments.option_forms import Named
from holdfast.experiments.record_files import short
from holdfast.experiments.spec import AlgorithmConfig


@dataclass(frozen=True)
class LabelledMethod:
    """A method under the name that tables and plots give it."""

    label: str
    method: Method | AlgorithmConfig  # itself, or as an experiment file describes it
    axes: Mapping[str, Any] = field(default_factory=dict)  # what is swept: dotted key -> value
    local_epochs: int | None = None  # instead of its local_steps, and of the ``local_epochs`` of the run

    @classmethod
    def of(cls, algorithm: Method | Named, label: str = "") -> LabelledMethod:
        """``algorithm`` itself, or the one that is named; ``label``: by default its class."""
        given, epochs = own_epochs(algorithm)
        method = as_method(given)
        return cls(label or type(method).__name__, method, local_epochs=epochs)

    @property
    def title(self) -> str:
        """Human-readable, such as ``LocalGECL lr=0.1``."""
        swept = [f"{key.rsplit('.', 1)[-1]}={short(value)}" for key, value in self.axes.items()]
        return " ".join([self.label, *swept])


# --- ``local_epochs``: a method's local steps, counted in passes over the nodes' data -------------------


Counts = np.ndarray | Sequence[int]


@dataclass(frozen=True)
class LocalEpochs:
    """So many ``epochs`` of nodes with ``counts`` [n] samples.

    All nodes take as many steps in a round: the mean over nodes of what their own epochs take, rounded up.
    Where they have as many samples, that is the same number for each.
    """

    epochs: int
    counts: Counts
    batch_size: int | Literal["full"]

    @property
    def of_nodes(self) -> list[int]:
        """[n]: the steps of one epoch of each node."""
        if self.batch_size == "full":
            return [1] * len(self.counts)
        return [-(-int(count) // self.batch_size) for count in self.counts]

    @property
    def steps(self) -> int:
        """Local steps of every node in a round."""
        return ceil(self.epochs * Fraction(sum(self.of_nodes), len(self.counts)))

    @property
    def note(self) -> str | None:
        """What is worth knowing where nodes differ: how often each passes over its data."""
        own = self.of_nodes
        if min(own) == max(own):
            return None
        least, most = self.steps / max(own), self.steps / min(own)
        return (
            f"local_epochs = {self.epochs}: all nodes take {self.steps} local steps in a round, the mean of "
            f"what their own epochs take. So the largest passes over its data {least:.2g} times, and the "
            f"smallest {most:.2g} times"
        )

    def of(self, method: Method) -> Method:
        """``method`` with that many local steps."""
        name = type(method).__name__
        known = parameters(type(method)).get("local_steps")
        if known is None:
            raise HoldfastError(f"local_epochs: {name} takes no local_steps, so leave it out")
        if not all(self.counts):
            raise HoldfastError("local_epochs: it is not known how many samples nodes have; give local_steps")
        if vars(method)["local_steps"] != known.default:
            raise HoldfastError(f"local_epochs: {name} has local_steps already; give one of them")
        changed: dict[str, Any] = {"local_steps": self.steps}
        return replace(method, **changed)
