"""The loop over rounds: step, measure at the chosen cadence, stop on divergence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from holdfast.core.tree import all_finite
from holdfast.engines.common.simulation import Simulation

Row = dict[str, float]


@dataclass
class Run:
    """A simulation under way, with what it has recorded. Iterating runs it round by round."""

    simulation: Simulation
    rounds: int
    every: int  # measure every so many rounds, and after the last
    measure: Callable[[Simulation], Row]
    seconds: float = 0.0  # spent in rounds, without measuring
    rows: list[Row] = field(default_factory=list)
    diverged: bool = False

    def __iter__(self) -> Iterator[Row | None]:
        """Yields after every round the row it recorded, if any; first the row of the initial models."""
        if self.simulation.round == 0:
            yield self._record()
        while self.simulation.round < self.rounds and not self.diverged:
            start = time.perf_counter()
            self.simulation.step()
            due = self.simulation.round % self.every == 0 or self.simulation.round == self.rounds
            if due and self.simulation.problem.x0.is_cuda:
                torch.cuda.synchronize()  # rounds are only queued; their time ends when they do
            self.seconds += time.perf_counter() - start
            yield self._record() if due else None

    def _record(self) -> Row:
        self.simulation.settle(wait=True)
        row: Row = {"round": self.simulation.round, **self.measure(self.simulation), "seconds": self.seconds}
        self.rows.append(row)
        # Accuracies stay finite whatever the models, so these are looked at as well.
        finite = all(math.isfinite(value) for value in row.values())
        diverged = not (finite and all_finite(self.simulation.models))
        self.diverged = self.simulation.world.any(diverged)
        return row
