"""Exchange at a deployed node: one row, whose neighbours' rows arrive as files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from holdfast.contract import Channel, Inbox
from holdfast.contract.aggregation import Aggregation
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import coin
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import ChannelRun, wire_like
from holdfast.engines.common.counters import Traffic
from holdfast.engines.common.robust import combine
from holdfast.topology import Network
from holdfast_deploy.member.transport import Transport, add_to, read
from holdfast_deploy.storage.messages import MessageFile

M = TypeVar("M")


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
    channel_run: ChannelRun
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

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        number, channel = self._next_exchange(), self.channel_run.channel
        sent = self.channel_run.send(message)
        self.channel_run.check()
        if self.now.is_server:
            self.traffic.count(1, message, sent.wire)
            answer = wire_like(channel.down, message)
            file = self.transport.through_server(number, sent.wire, answer)
            device = self.like.device
            mean = self.transport.retry_while_full(lambda: read(file, channel.down, answer, message, device))
            return self.channel_run.from_server(sent, mean, self.now.nodes)
        weights = self.now.weights
        assert weights is not None
        if not sporadic:
            own_file, received = self.transport.broadcast(number, sent.wire, self.neighbours)
        else:
            self.draws += 1
            available = self.network.available_links(self.seed, self.round, self.draws)
            own = (self.now.links() == self.node).any(1)
            drawn = [j for j in self.neighbours if (self._link(j) & available & own).any()]
            own_file, received = self.transport.sporadic(number, sent.wire, drawn)
            took_part = np.zeros(len(available), dtype=bool)
            for j in received:
                took_part |= self._link(j)
            weights = self.now.weights_over(took_part | ~own)  # this node's row depends on its own links only
        self.traffic.count(len(received), message, sent.wire)
        row = weights[[self.node]].toarray()[0]
        mixing = {int(j): float(row[j]) for j in (*received, self.node)}
        like, wire = (_shapes(tree) for tree in (message, sent.wire))
        files, others = received | {self.node: own_file}, list(received)
        rule = self.network.aggregation
        inbox = NodeInbox(like, wire, self.like.device, mixing, others, files, channel, self.transport, rule)
        return self.channel_run.from_neighbours(sent, inbox, self)

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
    """What a node received from its neighbours in one exchange. It holds files: messages may be large."""

    like: M  # a message, on the device "meta"
    wire: Any  # how it travelled, likewise
    device: torch.device
    weights: dict[int, float]  # of this node and of everybody whose message came
    senders: list[int]  # those others
    files: dict[int, MessageFile]  # of this node and of the others
    channel: Channel
    transport: Transport
    rule: Aggregation

    @cached_property
    def mixed(self) -> M:
        combine = partial(self._sum, self.weights) if self.rule.plain else self._judged
        return self.transport.retry_while_full(combine)

    @cached_property
    def neighbour_sum(self) -> M:
        return self.transport.retry_while_full(partial(self._sum, dict.fromkeys(self.senders, 1.0)))

    def _sum(self, weights: dict[int, float]) -> M:
        """The messages of the nodes in ``weights``, weighted, in the order of their numbers."""
        total = tree_map(lambda t: torch.zeros_like(t, device=self.device), self.like)
        for j, weight in sorted(weights.items()):
            add_to(total, self.files[j], self.channel, self.wire, weight)
        return total

    def _judged(self) -> M:
        """All messages at once, the node's own first, as the rule puts them together."""
        [own] = set(self.weights) - set(self.senders)
        order = [own, *sorted(self.senders)]
        messages: list[M] = [
            read(self.files[j], self.channel, self.wire, self.like, self.device) for j in order
        ]
        return combine(self.rule, [self.weights[j] for j in order], messages)


def _shapes(tree: M) -> M:
    return tree_map(lambda t: torch.empty_like(t, device="meta"), tree)


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
        sent = peers.channel_run.swap(z, torch.zeros(len(z), dtype=torch.int64, device=z.device))
        peers.channel_run.check()
        peers.traffic.count(len(z), z, sent.wire)
        rows = {j: tree_map(lambda t, i=i: t[i : i + 1], sent.wire) for i, j in enumerate(peers.neighbours)}
        received, channel = peers.transport.scatter(peers._next_exchange(), rows), peers.channel_run.channel
        return peers.transport.retry_while_full(
            lambda: torch.cat(
                [read(received[j], channel, rows[j], z[:1], z.device) for j in peers.neighbours]
            )
        )
