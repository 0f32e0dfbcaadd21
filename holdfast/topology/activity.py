"""Sporadic networks: how often nodes are able to compute, and links to transmit (DSpodFL's d_i and b_ij)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv

from holdfast.errors import HoldfastError
from holdfast.randomness import Stream, uniform
from holdfast.registry import Registry
from holdfast.validation import Count, Positive, Probability, Seed, check, check_fields

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distribution(ABC):
    """What probabilities are drawn from, one for each node or link; never below ``floor``."""

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def quantile(self, u: Floats) -> Floats:
        """The values that uniform numbers ``u`` in [0, 1) stand for."""


DISTRIBUTIONS: Registry[Distribution] = Registry("distribution")


@DISTRIBUTIONS.register("uniform")
@dataclass(frozen=True)
class UniformChance(Distribution):
    """Uniform between ``low`` and ``high``; smaller draws than ``floor`` count as ``floor``."""

    low: float = 0.0
    high: Probability = 1.0
    floor: Probability = 1e-3

    def quantile(self, u: Floats) -> Floats:
        if not 0 <= self.low <= self.high:
            raise HoldfastError(
                f"UniformChance.low: should lie between 0 and high = {self.high}, got {self.low}"
            )
        return np.maximum(self.low + (self.high - self.low) * u, self.floor)


@DISTRIBUTIONS.register("beta")
@dataclass(frozen=True)
class BetaChance(Distribution):
    """Beta(a, b); smaller draws than ``floor`` count as ``floor``."""

    a: Positive = 0.5
    b: Positive = 0.5
    floor: Probability = 1e-3

    def quantile(self, u: Floats) -> Floats:
        return np.asarray(np.maximum(betaincinv(self.a, self.b, u), self.floor))


Chance = float | Sequence[float] | Mapping[tuple[int, int], float] | Distribution | Callable[[int], Any]


class Probabilities(NamedTuple):
    """In one round: of every node to compute, [n], and of every link to transmit, [E]."""

    compute: Floats
    links: Floats


@dataclass(frozen=True)
class Activity:
    """Probabilities of computing and of transmitting, each one of:

    a number for all; a sequence with one per node (or link, in the order of ``Network.links``); for links
    also a mapping from pairs (i, j), the others being 1; a ``Distribution``, drawn once, or anew every
    ``redraw_every`` rounds; or a function of the round that returns any of the former.
    """

    compute: Chance = 1.0
    links: Chance = 1.0
    seed: Seed = 0
    redraw_every: Count | None = None

    def __post_init__(self) -> None:
        check("seed", Seed, self.seed)
        check("redraw_every", Count | None, self.redraw_every)

    def at(self, round: int, nodes: int, links: NDArray[np.int64]) -> Probabilities:
        """The probabilities in ``round`` on a graph with the given links, [E, 2]."""
        pairs = links[:, 0] * nodes + links[:, 1]
        return Probabilities(
            compute=self._evaluate("compute", self.compute, round, np.arange(nodes), None),
            links=self._evaluate("links", self.links, round, pairs + nodes, links),
        )

    def _evaluate(
        self, name: str, chance: Any, round: int, keys: NDArray[np.int64], pairs: NDArray[np.int64] | None
    ) -> Floats:
        if callable(chance):
            chance = chance(round)
        if isinstance(chance, Mapping):
            return _by_pair(name, chance, pairs)
        if isinstance(chance, Distribution):
            # Keyed by what they belong to, so that a link keeps its draw however the graph changes around it.
            epoch = round // self.redraw_every if self.redraw_every else 0
            u = uniform(self.seed, Stream.CAPABILITY, epoch, 0, torch.as_tensor(keys)).numpy()
            return chance.quantile(u)
        values = np.asarray(chance, dtype=np.float64)
        if values.ndim > 1 or (values.ndim == 1 and len(values) != len(keys)):
            what = "node" if pairs is None else "link"
            raise HoldfastError(
                f"{name}: expected one probability per {what} ({len(keys)}), got {values.shape}"
            )
        return _in_range(name, np.broadcast_to(values, (len(keys),)))


def _by_pair(name: str, chances: Mapping[tuple[int, int], float], pairs: NDArray[np.int64] | None) -> Floats:
    if pairs is None:
        raise HoldfastError(f"{name}: a mapping is for links; give a number or one probability per node")
    place = {(i, j): index for index, (i, j) in enumerate(pairs.tolist())}
    values = np.ones(len(pairs))
    for (i, j), value in chances.items():
        if (min(i, j), max(i, j)) not in place:
            raise HoldfastError(f"{name}: there is no link between {i} and {j}")
        values[place[min(i, j), max(i, j)]] = value
    return _in_range(name, values)


def _in_range(name: str, values: Floats) -> Floats:
    outside = values[~((values > 0) & (values <= 1))]
    if len(outside):
        raise HoldfastError(f"{name}: probabilities should lie in (0, 1], got {outside[0]:g}")
    return values
