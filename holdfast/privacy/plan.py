"""Before training: how often a run will look at the data, and the noise that this needs."""

from __future__ import annotations

import math

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.privacy.budget import DP, LEAST_NOISE, MOST_NOISE, NodeDP
from holdfast.privacy.ledger import Ledger

CLOSE = 1.003  # how near the smallest multiplier is found


def protection(
    budget: DP | NodeDP, planned: np.ndarray, samples: np.ndarray, batch_size: int | None
) -> Ledger:
    """A ledger whose noise keeps ``planned`` [n, 2] accesses within ``budget``, unless that says which noise.

    ``samples`` [n]: of every node.
    """

    def within(multiplier: float) -> bool:
        return Ledger(budget, samples, batch_size, multiplier).epsilon_of(planned) <= budget.epsilon

    if budget.noise_multiplier is not None:
        return Ledger(budget, samples, batch_size, budget.noise_multiplier)
    if batch_size is not None and (few := np.nonzero(samples < batch_size)[0]).size:
        raise HoldfastError(f"private: node {few[0]} has fewer samples than batch_size = {batch_size}")
    low, high = 0.5, 1.0  # little noise takes long to account for, so it is only tried where need be
    while high > LEAST_NOISE and within(low):
        low, high = low / 2, low
    while not within(high):
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise HoldfastError(
                f"private: no noise keeps {int(planned.sum(1).max())} accesses within epsilon = "
                f"{budget.epsilon:g}, delta = {budget.delta:g}; ask for a larger budget or fewer rounds"
            )
    while high > CLOSE * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if within(middle) else (middle, high)
    ledger = Ledger(budget, samples, batch_size, high)
    ledger.safe = planned
    return ledger
