"""Sporadic networks: how often nodes are able to compute, and links to transmit (DSpodFL's d_i and b_ij)."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import RandomStream, uniform
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, NonNegative, Positive, Probability, Seed, check, check_fields

Floats = NDArray[np.float64]
LinkDraws = Literal["once", "each-end", "latched"]
Links = NDArray[np.int64]


@dataclass(frozen=True)
class Distribution(ABC):
    """What probabilities are drawn from, one for each node or link."""

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def quantile(self, u: Floats) -> Floats:
        """The values, in (0, 1], that uniform numbers ``u`` in [0, 1) stand for."""


DISTRIBUTIONS: Registry[Distribution] = Registry("distribution")


@DISTRIBUTIONS.register("uniform")
@dataclass(frozen=True)
class UniformChance(Distribution):
    """Uniform between `low` and `high`; draws below `floor` count as `floor`."""

    low: NonNegative = 0.0
    high: Probability = 1.0
    floor: Probability = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("low", "floor"):
            if getattr(self, name) > self.high:
                raise HoldfastError(
                    f"UniformChance.{name}: should be at most high = {self.high}, got {getattr(self, name)}"
                )

    def quantile(self, u: Floats) -> Floats:
        return np.maximum(self.low + (self.high - self.low) * u, self.floor)


@DISTRIBUTIONS.register("beta")
@dataclass(frozen=True)
class BetaChance(Distribution):
    """Beta(a, b), by default mostly near 0 or 1; draws below `floor` count as `floor`."""

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


@dataclass(frozen=True, eq=False)
class Activity:
    """Probabilities of computing and of transmitting, each one of:

    a number for all; a sequence with one per node (or link, in the order of ``Network.links``); for links
    also a mapping from pairs (i, j), the others being 1; a ``Distribution``, drawn once, or again every
    ``redraw_every`` rounds; or a function of the round that returns any of the former.

    ``link_draws``: ``once`` per link and round, as in DSpodFL's paper; by ``each-end``, so that a link is
    available with probability 1 - (1 - b)^2, as in the first version of the authors' code; or ``latched``:
    a link that was available once stays so, as in its later version.
    """

    compute: Chance = 1.0
    links: Chance = 1.0
    seed: Seed = 0
    redraw_every: Count | None = None
    link_draws: LinkDraws = "once"

    def __post_init__(self) -> None:
        check("seed", Seed, self.seed)
        check("redraw_every", Count | None, self.redraw_every)
        check("link_draws", LinkDraws, self.link_draws)
        may_be_drawn = [isinstance(chance, Distribution) or callable(chance) for chance in self._both]
        if self.redraw_every and not any(may_be_drawn):
            raise HoldfastError("redraw_every: neither compute nor links is drawn from a distribution")
        changing = callable(self.links) or (self.redraw_every and may_be_drawn[1])
        if self.link_draws == "latched" and changing:
            raise HoldfastError("link_draws: for latched links, their probabilities must not change")

    @property
    def _both(self) -> tuple[Chance, Chance]:
        return self.compute, self.links

    def since(self, round: int) -> int:
        """The first of the rounds up to ``round`` that share its probabilities on the same graph."""
        if any(map(callable, self._both)):
            return round
        return round - round % self.redraw_every if self.redraw_every else 0

    def at(self, round: int, nodes: int, links: Links) -> Probabilities:
        """The probabilities in ``round`` on a graph with the given links, [E, 2]."""
        pairs = links[:, 0] * nodes + links[:, 1]
        return Probabilities(
            compute=self._evaluate("compute", self.compute, round, np.arange(nodes), None),
            links=self._evaluate("links", self.links, round, nodes + pairs, links),
        )

    def available(
        self, chances: Floats, nodes: int, links: Links, seed: int, round: int, draw: int
    ) -> NDArray[np.bool_]:
        """Which links, [E], are available in ``round``: drawn once per link, so both ends see the same."""
        # Of latched links, one number for all rounds decides when they come up first.
        drawn_in = 0 if self.link_draws == "latched" else round
        number = torch.as_tensor(links[:, 0] * nodes + links[:, 1])
        drawn = uniform(seed, RandomStream.LINK, drawn_in, draw, number).numpy()
        return np.asarray(drawn < self.availability(chances, round))

    def availability(self, chances: Floats, round: int) -> Floats:
        """How likely links with these ``chances``, [E], are available in ``round``."""
        attempts = {"once": 1, "each-end": 2, "latched": round + 1}[self.link_draws]
        return chances if attempts == 1 else 1 - (1 - chances) ** attempts

    def _evaluate(
        self, name: str, chance: Any, round: int, keys: NDArray[np.int64], pairs: Links | None
    ) -> Floats:
        """One probability for each of ``keys``: the numbers of nodes or, where ``pairs`` are given, links."""
        if callable(chance):
            chance, name = chance(round), f"{name} at round {round}"
        if isinstance(chance, Distribution):
            # Keyed by what they belong to, so that a link keeps its draw however the graph changes around it.
            epoch = round // self.redraw_every if self.redraw_every else 0
            u = uniform(self.seed, RandomStream.CAPABILITY, epoch, 0, torch.as_tensor(keys)).numpy()
            return chance.quantile(u)
        if isinstance(chance, Mapping):
            if pairs is None:
                raise HoldfastError(f"{name}: pairs are for links; give a number or one per node")
            chance = _one_per_link(name, chance, pairs)
        return _probabilities(name, chance, len(keys), "nodes" if pairs is None else "links")


def _probabilities(name: str, chance: Any, count: int, what: str) -> Floats:
    """``chance``, a number or one for each of ``count``, checked, as an array [count]."""
    try:
        values = np.asarray(chance)
    except ValueError:  # ragged lists
        values = np.asarray(None)
    if values.dtype.kind not in "iuf":
        raise HoldfastError(f"{name}: expected probabilities, got {str(chance)[:60]!r}")
    if values.ndim and values.shape != (count,):
        raise HoldfastError(
            f"{name}: expected one probability for each of the {count} {what}, or one for all, "
            f"got {' x '.join(map(str, values.shape))}"
        )
    outside = values[~((values > 0) & (values <= 1))]
    if outside.size:
        raise HoldfastError(f"{name}: probabilities should lie in (0, 1], got {outside.flat[0]:g}")
    return np.full(count, values, dtype=np.float64)


def _one_per_link(name: str, chances: Mapping[tuple[int, int], float], pairs: Links) -> list[float]:
    """What ``chances`` gives to some of the links, and 1 for the others."""
    by_link = dict.fromkeys(map(tuple, pairs.tolist()), 1.0)
    for (i, j), chance in check(name, dict[tuple[int, int], float], dict(chances)).items():
        if (min(i, j), max(i, j)) not in by_link:
            raise HoldfastError(f"{name}: there is no link between {i} and {j}")
        by_link[min(i, j), max(i, j)] = chance
    return list(by_link.values())


def read_chance(name: str, value: Any) -> Chance:
    """As it stands in an experiment file: plain, ``{distribution = "beta", ...}`` or ``{"0-1" = 0.5}``."""
    if not isinstance(value, dict):
        plain: Chance = value
        return plain
    if "distribution" in value:
        options = dict(value)
        return DISTRIBUTIONS.build(options.pop("distribution"), options)
    by_link = {}
    for key, chance in value.items():
        pair = re.fullmatch(r"(\d+)-(\d+)", key)
        if pair is None:
            raise HoldfastError(f"{name}: expected 'distribution' or a link such as '0-1', got {key!r}")
        by_link[int(pair[1]), int(pair[2])] = chance
    return by_link
