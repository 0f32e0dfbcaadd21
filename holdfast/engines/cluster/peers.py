"""Exchange between ranks: rows that neighbours elsewhere need travel while those here are mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.contract import Inbox
from holdfast.core.tree import leaves, tree_map
from holdfast.core.world import World
from holdfast.engines.cluster.links import Arriving, ClusterLinks, Halo
from holdfast.engines.common.peers import StackedEdges, StackedPeers
from holdfast.engines.common.products import Matrix, exact_product

M = TypeVar("M")


@dataclass
class ClusterPeers(StackedPeers):
    """The links of the nodes here in one round; messages are ``[m, d]``. Traffic counts everybody's."""

    links: ClusterLinks
    world: World = field(kw_only=True)

    def _deliver(self, message: M, available: NDArray[np.bool_] | None) -> Inbox[M]:
        if self.network.is_server:
            return ServerInbox(message, self.world, self.network.nodes)
        halo = self.links.halo if available is None else self.links.halo_over(available)
        arriving = [halo.crossing.start(tensor) for tensor in leaves(message)]
        return ClusterInbox(message, self.links, halo, arriving, available)

    def _edges(self) -> StackedEdges:
        return ClusterEdges(self.links, self.traffic, self.carrier, self.link_time)


@dataclass(frozen=True)
class ServerInbox(Generic[M]):
    """What a server made of everybody's message."""

    sent: M
    world: World
    nodes: int

    @cached_property
    def mixed(self) -> M:
        return tree_map(lambda t: self.world.mean(t, self.nodes).expand_as(t), self.sent)

    @cached_property
    def neighbour_sum(self) -> M:
        return tree_map(lambda t: self.world.sum(t.sum(0)) - t, self.sent)


@dataclass(frozen=True)
class ClusterInbox(Generic[M]):
    """What the nodes here received in one exchange, from nodes here and elsewhere."""

    sent: M
    links: ClusterLinks
    halo: Halo
    arriving: list[Arriving]  # one for each tensor of the message
    available: NDArray[np.bool_] | None  # [E]: the links that took part; None: all

    @cached_property
    def mixed(self) -> M:
        if self.available is None:
            return self._product(*self.links.own_weights)
        return self._product(*self.links.split(self.links.network.weights_over(self.available), self.halo))

    @cached_property
    def neighbour_sum(self) -> M:
        assert self.available is None, "sporadic methods use mixed"
        return self._product(*self.links.own_adjacency)

    def _product(self, here: Matrix, there: Matrix) -> M:
        mixed = tree_map(lambda t: exact_product(here, t), self.sent)  # while the others' rows are on the way
        arriving = iter(self.arriving)
        return tree_map(lambda t: t + exact_product(there, next(arriving).wait()), mixed)


@dataclass(frozen=True)
class ClusterEdges(StackedEdges):
    """One row per directed link of the nodes here, [e, d]."""

    links: ClusterLinks

    def _swapped(self, z: Tensor) -> Tensor:
        places, crossing = self.links.link_crossing
        arriving = crossing.start(z)
        inside, opposite = self.links.inner_reverse
        received = torch.empty_like(z)
        received[inside] = z[opposite]
        received[places] = arriving.wait()
        return received
