"""Exchange at a deployed node: one row, whose neighbours' rows arrive as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import coin
from holdfast.core.tree import row_size, tree_map
from holdfast.engines.common.counters import Traffic
from holdfast.engines.deploy.storage.messages import MessageFile
from holdfast.topology import Network

M = TypeVar("M")
T = TypeVar("T")


class Transport(Protocol):
    """How a node's messages travel; every call blocks until all that is due has come."""

    def broadcast(self, exchange: int, message: Any, neighbours: list[int]) -> dict[int, MessageFile]:
        """Sends ``message`` to all ``neighbours``; theirs."""

    def sporadic(self, exchange: int, message: Any, neighbours: list[int]) -> dict[int, MessageFile]:
        """The same, but without those neighbours with whom it did not work out, at either end."""

    def scatter(self, exchange: int, messages: Mapping[int, Tensor]) -> dict[int, MessageFile]:
        """Sends every neighbour something else."""

    def through_server(self, exchange: int, message: Any) -> MessageFile:
        """Sends ``message`` to the server; the mean of everybody's."""

    def insist(self, read: Callable[[], T]) -> T:
        """What ``read`` gives; tried again from the start where files run out."""


@dataclass
class NodePeers:
    """The links of one node in one round; messages are ``[1, d]``."""

    node: int
    network: Network
    seed: int
    round: int
    transport: Transport
    like: Tensor  # number type and device of the messages
    traffic: Traffic  # what this node sends
    draws: int = 0  # shared coins and sporadic exchanges of this round so far
    exchanges: int = 0  # of this round so far

    @cached_property
    def now(self) -> Network:
        return self.network.at(self.round)

    @cached_property
    def neighbours(self) -> list[int]:
        return [int(j) for j in self.now.neighbours(self.node)]

    @property
    def degree(self) -> Tensor:
        degree = self.now.nodes - 1 if self.now.is_server else len(self.neighbours)
        return torch.full((1, 1), degree).to(self.like)

    def exchange(self, message: M, sporadic: bool = False) -> ServerInbox[M] | NodeInbox[M]:
        number = self._next_exchange()
        if self.now.is_server:
            self.traffic.numbers += row_size(message)
            mean = self.transport.through_server(number, message)
            return ServerInbox(message, mean, self.now.nodes, self.like.device, self.transport)
        weights = self.now.weights
        assert weights is not None
        if not sporadic:
            received = self.transport.broadcast(number, message, self.neighbours)
        else:
            self.draws += 1
            available = self.network.available_links(self.seed, self.round, self.draws)
            own = (self.now.links() == self.node).any(1)
            drawn = [j for j in self.neighbours if (self._link(j) & available & own).any()]
            received = self.transport.sporadic(number, message, drawn)
            took_part = np.zeros(len(available), dtype=bool)
            for j in received:
                took_part |= self._link(j)
            weights = self.now.weights_over(took_part | ~own)  # this node's row depends on its own links only
        self.traffic.numbers += len(received) * row_size(message)
        row = weights[[self.node]].toarray()[0]
        mixing = {int(j): float(row[j]) for j in (*received, self.node)}
        return NodeInbox(message, self.node, mixing, received, self.transport)

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.seed, self.round, self.draws, probability)

    @cached_property
    def edges(self) -> NodeEdges:
        if self.network.sequence is not None:
            raise HoldfastError(
                "network: a method that keeps vectors for its links needs links that stay the same"
            )
        return NodeEdges(self)

    def _next_exchange(self) -> int:
        self.exchanges += 1
        return self.exchanges - 1

    def _link(self, other: int) -> np.ndarray:
        """Which of all links, [E], is the one to ``other``."""
        ends = (min(self.node, other), max(self.node, other))
        return np.asarray((self.now.links() == ends).all(1))


@dataclass(frozen=True)
class NodeInbox(Generic[M]):
    """What a node received from its neighbours in one exchange."""

    sent: M
    node: int
    weights: dict[int, float]  # of this node and of everybody whose message came
    received: dict[int, MessageFile]
    transport: Transport

    @cached_property
    def mixed(self) -> M:
        return self.transport.insist(self._mixed)

    @cached_property
    def neighbour_sum(self) -> M:
        return self.transport.insist(self._neighbour_sum)

    def _mixed(self) -> M:
        total = tree_map(torch.zeros_like, self.sent)
        for j in sorted(self.weights):
            if j == self.node:
                tree_map(lambda t, own: t.add_(own, alpha=self.weights[self.node]), total, self.sent)
            else:
                self.received[j].add_to(total, self.weights[j])
        return total

    def _neighbour_sum(self) -> M:
        total = tree_map(torch.zeros_like, self.sent)
        for j in sorted(self.received):
            self.received[j].add_to(total)
        return total


@dataclass(frozen=True)
class ServerInbox(Generic[M]):
    """What a node received from a server: the mean over everybody."""

    sent: M
    mean: MessageFile
    nodes: int
    device: torch.device
    transport: Transport

    @cached_property
    def mixed(self) -> M:
        mixed: M = self.transport.insist(lambda: self.mean.read(self.sent, self.device))
        return mixed

    @cached_property
    def neighbour_sum(self) -> M:
        return tree_map(lambda mean, own: self.nodes * mean - own, self.mixed, self.sent)


@dataclass(frozen=True)
class NodeEdges:
    """One row per link of the node, [e, d], sorted by the other end."""

    peers: NodePeers

    @cached_property
    def sign(self) -> Tensor:
        node = self.peers.node
        signs = [1.0 if node > other else -1.0 for other in self.peers.neighbours]
        return torch.tensor(signs).to(self.peers.like)[:, None]

    @cached_property
    def degree(self) -> Tensor:
        degrees = self.peers.now.degrees
        larger = [max(degrees[self.peers.node], degrees[other]) for other in self.peers.neighbours]
        return torch.tensor(np.array(larger)).to(self.peers.like)[:, None]

    def spread(self, x: Tensor) -> Tensor:
        return x.expand(len(self.peers.neighbours), -1)

    def total(self, z: Tensor) -> Tensor:
        return z.sum(0, keepdim=True)

    def swap(self, z: Tensor) -> Tensor:
        peers = self.peers
        peers.traffic.numbers += z.numel()
        rows = {other: z[i : i + 1] for i, other in enumerate(peers.neighbours)}
        received = peers.transport.scatter(peers._next_exchange(), rows)
        return peers.transport.insist(
            lambda: torch.cat([received[other].read(rows[other], z.device) for other in peers.neighbours])
        )
