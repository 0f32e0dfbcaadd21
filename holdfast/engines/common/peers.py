"""Exchange in the simulator: all rows live in one tensor, so mixing is a matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast.contract import Inbox
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import coin
from holdfast.core.tree import row_size, tree_map
from holdfast.core.world import ALONE, World
from holdfast.engines.common.channel_run import ChannelRun, Sent
from holdfast.engines.common.counters import Counters, Traffic, Work
from holdfast.engines.common.links import StackedLinks, exact_product
from holdfast.engines.common.oracle import Guard, unguarded
from holdfast.engines.common.robust import RobustInbox, SummedUp, aggregated, forged
from holdfast.topology import Network

M = TypeVar("M")


@dataclass
class StackedPeers:
    """Every node's links in one round; messages are ``[n, d]``."""

    network: Network
    links: StackedLinks  # those of the network in this round
    seed: int
    round: int
    traffic: Traffic
    channel_run: ChannelRun
    draws: int = 0  # shared coins and sporadic exchanges of this round so far

    @property
    def degree(self) -> Tensor:
        return self.links.degree

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        available = self._draw_links() if sporadic else None
        vectors = self.links.vectors(row_size(message))
        self.traffic.count_delay(self._share_of_delay(available) * vectors, self.link_time)
        network, nodes = self.links.network, self.network.nodes
        sent = self.channel_run.send(message)
        inbox = (
            self._deliver(sent.arrived, available)
            if self.network.trusting
            else self._robust_inbox(sent, available)
        )
        if self.channel_run.channel.transparent or not network.is_server:
            messages = network.directed_links if available is None else 2 * int(available.sum())
            self.traffic.count(messages, message, sent.wire)
            return self.channel_run.from_neighbours(sent, inbox, self)
        answer = self.channel_run.answer(
            tree_map(lambda t: t[:1], inbox.mixed), self.channel_run.exchanges - 1, nodes
        )
        self.traffic.count(nodes, message, sent.wire)
        self.traffic.count(nodes, answer.message, answer.wire)
        mean = tree_map(lambda t, rows: t.expand_as(rows), answer.arrived, message)
        return self.channel_run.from_server(sent, mean, nodes)

    def _deliver(self, message: M, available: NDArray[np.bool_] | None) -> Inbox[M]:
        return StackedInbox(message, self.links, available)

    def _robust_inbox(self, sent: Sent, available: NDArray[np.bool_] | None) -> Inbox[Any]:
        """What arrives where some lie, or where it is not just averaged."""
        received = forged(self.network, sent.arrived, self.channel_run.nodes)
        if self.network.is_server:
            return SummedUp(aggregated(self.network, received), received)
        incoming = self.links.incoming if available is None else self.links.incoming_over(available)
        return RobustInbox(sent.arrived, received, incoming, self.network.aggregation)

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    @cached_property
    def edges(self) -> StackedEdges:
        if self.network.sequence is not None:
            raise HoldfastError(
                "network: a method that keeps vectors for its links needs links that stay the same"
            )
        return self._edges()

    def _edges(self) -> StackedEdges:
        return StackedEdges(self.links, self.traffic, self.channel_run, self.link_time)

    @cached_property
    def link_time(self) -> float:
        """What a vector over all links takes."""
        return self.network.link_time(self.round)

    def _draw_links(self) -> NDArray[np.bool_]:
        self.draws += 1
        return self.network.available_links(self.seed, self.round, self.draws)

    def _share_of_delay(self, available: NDArray[np.bool_] | None) -> float:
        """sum_i (1/deg_i) sum_j available_ij / b_ij, over the same sum with all links."""
        if available is None:
            return 1.0
        cost = self.network.link_times(self.round)
        return float(cost[available].sum() / cost.sum()) if len(cost) else 0.0


@dataclass(frozen=True)
class StackedInbox(Generic[M]):
    """What every node received in one exchange."""

    sent: M
    links: StackedLinks
    available: NDArray[np.bool_] | None = None  # [E]: the links that took part; None: all

    @cached_property
    def mixed(self) -> M:
        if self.links.network.is_server:
            return tree_map(lambda t: t.mean(0, keepdim=True).expand_as(t), self.sent)
        weights = self.links.weights if self.available is None else self.links.weights_over(self.available)
        return tree_map(lambda t: exact_product(weights, t), self.sent)

    @cached_property
    def neighbour_sum(self) -> M:
        assert self.available is None, "sporadic methods use mixed"
        if self.links.network.is_server:
            return tree_map(lambda t: t.sum(0, keepdim=True) - t, self.sent)
        return tree_map(lambda t: exact_product(self.links.adjacency, t), self.sent)


@dataclass(frozen=True)
class StackedEdges:
    """One row per directed link, [2E, d], sorted by the node that owns it."""

    links: StackedLinks
    traffic: Traffic
    channel_run: ChannelRun
    link_time: float  # what a vector over all links takes

    @cached_property
    def sign(self) -> Tensor:
        own, other = self.links.ends
        return torch.where(own > other, 1.0, -1.0).to(self.links.like)[:, None]

    @cached_property
    def degree(self) -> Tensor:
        own, other = self.links.ends
        return torch.maximum(self.links.all_degrees[own], self.links.all_degrees[other])

    def spread(self, x: Tensor) -> Tensor:
        return x[self.links.rows]

    def total(self, z: Tensor) -> Tensor:
        return exact_product(self.links.gathering, z)

    def swap(self, z: Tensor) -> Tensor:
        sent = self.channel_run.swap(z, self.links.rows)
        self.traffic.count(self.links.network.directed_links, z, sent.wire)
        self.traffic.count_delay(self.links.vectors(z.shape[-1]), self.link_time)
        return self._swapped(sent.arrived)

    def _swapped(self, z: Tensor) -> Tensor:
        return z[self.links.reverse]


# --- where the rows of the nodes are: all of them here, or some on one rank of several --------------------


class Place:
    """All nodes are here. A rank of a cluster holds some of them and reaches the others over its world."""

    world: World = ALONE

    def nodes(self, network: Network) -> Tensor:
        """[m]: the numbers of the nodes here, ascending."""
        return torch.arange(network.nodes)

    def links(self, network: Network, like: Tensor) -> StackedLinks:
        """The links of the nodes here; messages have the device and type of ``like``."""
        return StackedLinks(network, like)

    def peers(
        self,
        network: Network,
        links: StackedLinks,
        seed: int,
        round: int,
        counters: Counters,
        channel_run: ChannelRun,
    ) -> StackedPeers:
        """The links of the nodes here in one round."""
        return StackedPeers(network, links, seed, round, counters.traffic, channel_run)

    def guard(self, counts: bool) -> Guard:
        """How local solves are tried; ``counts``: whether anybody needs their solutions."""
        return unguarded

    def held(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        """Those of ``chosen`` that are among the ``nodes`` here."""
        return chosen

    def rows(self, nodes: Tensor, chosen: Tensor) -> Tensor:
        """The rows of ``chosen``, all of them among the ``nodes`` here."""
        return chosen

    def raise_pending(self) -> None:
        """Called after every round: the place to raise what must be raised everywhere alike."""

    def total(self, work: Work) -> Work:
        """What all nodes, here and elsewhere, have computed so far."""
        return work

    def describe(self, network: Network) -> str:
        """How the nodes are spread, human-readable; empty if they are all here."""
        return ""


HERE = Place()
