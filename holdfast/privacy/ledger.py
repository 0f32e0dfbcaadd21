"""What was released so far, and its epsilon: every access is a Gaussian mechanism on a Poisson sample.

The arithmetic is that of ``dp-accounting``: privacy loss distributions (PLD) or Rényi divergences (RDP). Both
give upper bounds; those of RDP are larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.privacy.budget import DP, LEAST_NOISE, MOST_NOISE, Accountant, NodeDP
from holdfast.problem.sampling import OVERFLOW

# --- what was released so far, and its epsilon: every access is a Gaussian mechanism on a Poisson sample


MOST_ROUNDS = 4096  # rounds that are checked ahead at once
INTERVAL = 2e-4  # at which privacy losses are discretised, rounded up; more where they are large
POINTS = 2**18  # of them, about, at most

Mechanisms = tuple[tuple[float, float, int], ...]
"""(noise over sensitivity, rate of the sample, how often) of Gaussian mechanisms on Poisson samples."""


class Ledger:
    """The accesses to the data of n nodes with ``samples`` [n], and what they cost.

    ``batch_size``: the mean size of their Poisson samples; None: all data. ``multiplier``: that of the noise.
    Where whole nodes are protected, ``samples`` are nodes, a batch is a cohort, and a round is one access.
    """

    def __init__(
        self, budget: DP | NodeDP, samples: np.ndarray, batch_size: int | None, multiplier: float
    ) -> None:
        self.budget, self.multiplier, self.batch_size = budget, multiplier, batch_size
        self.samples = np.asarray(samples, dtype=np.int64)
        self.accesses = np.zeros((len(self.samples), 2), dtype=np.int64)  # minibatches, and of all data
        self.last = np.zeros(2, dtype=np.int64)  # of one round
        self.plan: np.ndarray | None = (
            None  # [rounds + 1, 2]: of each round, as planned, and before the first
        )
        self.safe = self.accesses.copy()  # the number of rounds known to be within the budget

    def begin(self, accesses: Sequence[int]) -> None:
        """Accesses before the first round; no message depends on them yet."""
        if isinstance(self.budget, DP):
            self.record(accesses)
        else:
            self.last = np.array((1, 0), dtype=np.int64)  # what every round will be

    def record(self, accesses: Sequence[int], nodes: Sequence[int] | None = None) -> None:
        """A round's ``accesses``, to minibatches and to all data, by ``nodes``, or by all."""
        if isinstance(self.budget, NodeDP):
            accesses = (1, 0)
            nodes = nodes if self.batch_size is None else None  # who was in a Poisson cohort stays secret
        self.last = np.array(accesses, dtype=np.int64)
        self.accesses[slice(None) if nodes is None else list(nodes)] += self.last

    def as_list(self) -> list[list[int]]:
        """All that ``restore`` needs: accesses of every node, and of the last round."""
        return [*self.accesses.tolist(), self.last.tolist()]

    def restore(self, saved: list[list[int]]) -> None:
        """Continues from what was saved."""
        *accesses, last = saved
        self.accesses, self.last = np.array(accesses, dtype=np.int64), np.array(last, dtype=np.int64)

    @property
    def epsilon(self) -> float:
        """What the node with the largest loss has spent, for the delta of the budget."""
        return self.epsilon_of(self.accesses)

    def exhausted(self, done: int) -> bool:
        """Whether the round after ``done`` of them would exceed the budget of some node."""
        ahead = self._ahead(done)
        if (self.accesses + ahead[0] > self.safe).any():
            self.safe = self.accesses + ahead[: self._rounds_left(ahead)].sum(0)
        return bool((self.accesses + ahead[0] > self.safe).any())

    def _ahead(self, done: int) -> np.ndarray:
        """[k, 2]: the accesses of rounds to come, as planned; like the last where that was not as planned."""
        if self.plan is None:
            return np.tile(self.last, (MOST_ROUNDS, 1))
        planned = self.plan[done + 1 : done + 1 + MOST_ROUNDS]
        return planned if (self.last <= self.plan[done]).all() else np.maximum(planned, self.last)

    def _rounds_left(self, ahead: np.ndarray) -> int:
        """How many of the rounds ``ahead`` are within the budget, computed once for all of them."""
        sums = np.cumsum(ahead, axis=0)

        def within(rounds: int) -> bool:
            return self.epsilon_of(self.accesses + sums[rounds - 1]) <= self.budget.epsilon

        low, high = 0, 1  # low is within the budget; high is not, or there are no more
        while high <= len(ahead) and within(high):
            low, high = high, 2 * high
        high = min(high, len(ahead) + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if within(middle) else (low, middle)
        return low

    @property
    def farewell(self) -> str:
        """The message when the budget is spent."""
        asked = self.budget
        return (
            f"another round would exceed the privacy budget: epsilon {self.epsilon:.4g} of {asked.epsilon:g} "
            f"is spent at delta {asked.delta:g}, noise multiplier {self.multiplier:.4g}"
        )

    def epsilon_of(self, accesses: np.ndarray) -> float:
        """The largest epsilon over nodes with ``accesses`` [n, 2]."""
        rates = np.ones(len(self.samples))
        if self.batch_size is None:
            accesses = np.stack([np.zeros(len(accesses), np.int64), accesses.sum(1)], 1)
        else:
            rates = self.batch_size / self.samples
        cases = np.unique(np.column_stack([rates, accesses]), axis=0)
        worst = [case for case in cases if not _dominated(case, cases)]
        delta, sigma, accountant = self.budget.delta, self.multiplier, self.budget.accountant
        return max(epsilon_of(sigma, delta, float(q), int(a), int(b), accountant) for q, a, b in worst)


def _dominated(case: np.ndarray, cases: np.ndarray) -> bool:
    """Whether another of ``cases`` is at least as bad in everything."""
    return bool(((cases >= case).all(1) & (cases > case).any(1)).any())


@lru_cache(maxsize=4096)
def epsilon_of(
    sigma: float,
    delta: float,
    rate: float,
    minibatches: int,
    of_all_data: int,
    accountant: Accountant = "pld",
) -> float:
    """The epsilon, for ``delta``, of so many Gaussian mechanisms with noise ``sigma`` times the sensitivity.

    ``minibatches`` of them read a Poisson sample of ``rate``, the others ``of_all_data``.
    """
    return composed_epsilon(delta, ((sigma, rate, minibatches), (sigma, 1.0, of_all_data)), accountant)


@lru_cache(maxsize=4096)
def composed_epsilon(
    delta: float, mechanisms: Mechanisms, accountant: Accountant = "pld", overflow: float = OVERFLOW
) -> float:
    """The epsilon, for ``delta``, of ``mechanisms``: (noise over sensitivity, rate of the sample, how often).

    A Poisson sample with more members than there are rows is not one of these mechanisms, so ``overflow`` of
    delta is set aside for each. That is enough, without a factor exp(epsilon): whether the *other* members
    fill the rows, an event of probability p <= ``overflow``, does not depend on the one that is protected.
    Given that they do not, a draw is one of the sampled Gaussian mechanism for these other members; given
    that they do, assume everything shows. The hockey-stick divergence H is jointly convex, so for every
    alpha >= 0 it is at most (1 - p) H_alpha(P, Q) + p, where P, Q is the pair that dominates the mechanism.
    This is the divergence of a pair that is P, Q with probability 1 - p and tells all otherwise, and n of
    those compose to at most H_alpha(P^n, Q^n) + n p.
    """
    done = tuple(mechanism for mechanism in mechanisms if mechanism[2])
    if not done:
        return 0.0
    left = delta - overflow * sum(times for _, rate, times in done if rate < 1)
    if left <= 0:
        return math.inf
    return float(_by_loss(left, done) if accountant == "pld" else _by_divergence(left, done))


def _by_loss(delta: float, mechanisms: Mechanisms) -> float:
    """With privacy loss distributions."""
    interval = _interval(mechanisms)
    try:
        parts = [_single(sigma, rate, interval).self_compose(times) for sigma, rate, times in mechanisms]
        return float(reduce(lambda one, other: one.compose(other), parts).get_epsilon_for_delta(delta))
    except OverflowError:  # of exp(epsilon)
        return math.inf


@lru_cache(maxsize=64)
def _single(sigma: float, rate: float, interval: float) -> Any:
    """The privacy loss distribution of one access."""
    return accounting().pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )


def _interval(mechanisms: Mechanisms) -> float:
    """The step at which losses are discretised: any gives an upper bound, small ones take memory and time.

    Where losses of all ``mechanisms`` together end, for the tails that count, is estimated by Rényi
    divergences of sampled Gaussian mechanisms (Mironov et al. 2019) of a few orders, and that of one access.
    """
    tail, losses = math.log(1e15), []
    for order in (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256):
        spent = sum(times * _divergence(sigma, rate, order) for sigma, rate, times in mechanisms)
        losses.append(spent + tail / (order - 1))
    alone = max(8 / sigma + 0.5 / sigma**2 for sigma, _, _ in mechanisms)
    largest = max(min(losses), alone)
    return float(INTERVAL * 2 ** max(0, math.ceil(math.log2(largest / (INTERVAL * POINTS)))))


def _divergence(sigma: float, rate: float, order: int) -> float:
    """The Rényi divergence of one access."""
    if rate == 1:
        return order / (2 * sigma**2)
    k = np.arange(order + 1)
    chosen = [math.lgamma(order + 1) - math.lgamma(i + 1) - math.lgamma(order - i + 1) for i in k]
    drawn = np.array(chosen) + (order - k) * math.log1p(-rate) + k * math.log(rate)
    terms = drawn + (k * k - k) / (2 * sigma**2)
    return float(np.logaddexp.reduce(terms)) / (order - 1)


def _by_divergence(delta: float, mechanisms: Mechanisms) -> float:
    """With Rényi divergences."""
    library = accounting()
    accountant = library.rdp.RdpAccountant()
    for sigma, rate, times in mechanisms:
        event = library.GaussianDpEvent(sigma)
        accountant.compose(event if rate == 1 else library.PoissonSampledDpEvent(rate, event), times)
    return float(accountant.get_epsilon(delta))


def accounting() -> Any:
    """The library that computes the cost of mechanisms."""
    try:
        import dp_accounting
        import dp_accounting.pld.privacy_loss_distribution
        import dp_accounting.rdp
    except ImportError:
        raise HoldfastError(
            "private: dp-accounting is not installed: pip install 'holdfast[privacy]'"
        ) from None
    return dp_accounting


# --- before training: how often a run will look at the data, and the noise that this needs --------------


CLOSE = 1.003  # how near the smallest multiplier is found


def protection(
    budget: DP | NodeDP, planned: np.ndarray, samples: np.ndarray, batch_size: int | None
) -> Ledger:
    """A ledger whose noise keeps ``planned`` [n, 2] accesses within ``budget``, unless that gives the noise.

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
