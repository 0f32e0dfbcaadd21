"""Exchange in the simulator: all rows live in one tensor, so mixing is a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.engines.simulate.links import StackedLinks
from holdfast.randomness import Stream, coin, uniform
from holdfast.topology import Network
from holdfast.tree import row_size, tree_map

M = TypeVar("M")


@dataclass
class Traffic:
    """What has been sent so far."""

    numbers: int = 0  # each counted once per message
    delay: float = 0.0  # DSpodFL's tau_trans: 1 for every exchange in which all links take part


@dataclass
class StackedPeers:
    """Every node's links in one round; messages are ``[n, d]``."""

    links: StackedLinks
    seed: int
    round: int
    traffic: Traffic
    chances: NDArray[np.float64]  # [E]: every link's probability of being available
    draws: int = 0  # shared coins and sporadic exchanges of this round so far

    @property
    def network(self) -> Network:
        return self.links.network

    @property
    def degree(self) -> Tensor:
        return self.links.degree

    def exchange(self, message: M, sporadic: bool = False) -> StackedInbox[M]:
        if not sporadic:
            self.traffic.numbers += self.network.directed_links * row_size(message)
            self.traffic.delay += 1.0
            return StackedInbox(message, self.links)
        active = self._active_links()
        self.traffic.numbers += 2 * int(active.sum()) * row_size(message)
        self.traffic.delay += self._share_of_delay(active)
        return StackedInbox(message, self.links, active)

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    @cached_property
    def edges(self) -> StackedEdges:
        return StackedEdges(self.links, self.traffic)

    def _active_links(self) -> NDArray[np.bool_]:
        self.draws += 1
        ends = torch.as_tensor(self.network.links())
        number = ends[:, 0] * self.network.nodes + ends[:, 1]
        u = uniform(self.seed, Stream.LINK, self.round, self.draws, number).numpy()
        return np.asarray(u < self.chances)

    def _share_of_delay(self, active: NDArray[np.bool_]) -> float:
        """sum_i (1/deg_i) sum_j active_ij / b_ij, over the same sum with all links active."""
        ends = self.network.links()
        per_node = 1 / np.maximum(self.network.degrees, 1)
        cost = (per_node[ends[:, 0]] + per_node[ends[:, 1]]) / self.chances
        return float(cost[active].sum() / cost.sum()) if len(cost) else 0.0


@dataclass(frozen=True)
class StackedInbox(Generic[M]):
    """What every node received in one exchange."""

    sent: M
    links: StackedLinks
    active: NDArray[np.bool_] | None = None  # [E]; None: all

    @cached_property
    def mixed(self) -> M:
        if self.links.network.is_server:
            return tree_map(lambda t: t.mean(0, keepdim=True).expand_as(t), self.sent)
        weights = self.links.weights if self.active is None else self.links.weights_over(self.active)
        return tree_map(lambda t: weights @ t, self.sent)

    @cached_property
    def neighbour_sum(self) -> M:
        assert self.active is None, "sporadic methods use mixed"
        if self.links.network.is_server:
            return tree_map(lambda t: t.sum(0, keepdim=True) - t, self.sent)
        return tree_map(lambda t: self.links.adjacency @ t, self.sent)


@dataclass(frozen=True)
class StackedEdges:
    """One row per directed link, [2E, d], sorted by the node that owns it."""

    links: StackedLinks
    traffic: Traffic

    @cached_property
    def sign(self) -> Tensor:
        own, other = self.links.ends
        return torch.where(own > other, 1.0, -1.0).to(self.links.like)[:, None]

    def spread(self, x: Tensor) -> Tensor:
        return x[self.links.ends[0]]

    def total(self, z: Tensor) -> Tensor:
        return self.links.gathering @ z

    def swap(self, z: Tensor) -> Tensor:
        self.traffic.numbers += z.numel()
        self.traffic.delay += 1.0
        return z[self.links.reverse]
