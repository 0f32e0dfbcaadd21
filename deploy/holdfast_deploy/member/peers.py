"""``Peers`` of a deployed node: one row, whose neighbours' rows arrive as files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from holdfast.contract import Channel, Inbox
from holdfast.contract.aggregation import Aggregation
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import coin
from holdfast.core.tree import tree_map
from holdfast.engines.common.channel_run import Sent, wire_like
from holdfast.engines.common.robust import combine
from holdfast.topology import Network
from holdfast_deploy.member.state import Exchange, RoundContext
from holdfast_deploy.member.sums import add_to, read
from holdfast_deploy.storage.messages import ExchangeKey, MessageFile, specs

M = TypeVar("M")


@dataclass
class NodePeers:
    """The links of one node in one round; messages are ``[1, d]``."""

    context: RoundContext
    transport: Exchange
    draws: int = 0  # shared coins and sporadic exchanges of this round so far
    exchanges: int = 0  # of this round so far

    @cached_property
    def now(self) -> Network:
        return self.context.network.at(self.context.round)

    @cached_property
    def neighbours(self) -> list[int]:
        return [int(j) for j in self.now.neighbours(self.context.node)]

    @property
    def like(self) -> Tensor:
        """Number type and device of the messages."""
        return self.context.like

    @property
    def degree(self) -> Tensor:
        degree = self.now.nodes - 1 if self.now.is_server else len(self.neighbours)
        return torch.full((1, 1), degree).to(self.like)

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        run, traffic = self.context.channel_run, self.context.traffic
        key, channel = self._next_key(), run.channel
        sent = run.send(message)
        run.check()
        if self.now.is_server:
            traffic.count(1, message, sent.wire)
            return run.from_server(sent, self._through_server(key, sent, channel), self.now.nodes)
        own_file, received, weights = self._among_neighbours(key, sent.wire, sporadic)
        traffic.count(len(received), message, sent.wire)
        node = self.context.node
        row = weights[[node]].toarray()[0]
        mixing = {int(j): float(row[j]) for j in (*received, node)}
        like, wire = (_shapes(tree) for tree in (message, sent.wire))
        files, others = received | {node: own_file}, list(received)
        rule = self.context.network.aggregation
        retry = self.transport.retry_while_full
        inbox = NodeInbox(like, wire, self.like.device, mixing, others, files, channel, retry, rule)
        return run.from_neighbours(sent, inbox, self)

    def _through_server(self, key: ExchangeKey, sent: Sent, channel: Channel) -> Any:
        """The mean that the server sends back."""
        server, device = self.context.server, self.like.device
        published = self.transport.publish(key, sent.wire)
        self.transport.submit(published)
        answer = wire_like(channel.down, sent.message)
        file = self.transport.fetch(key, [server], specs(answer))[server]
        self.transport.exchanged(server, key[0], [published.header.content], [file.header.content])
        return self.transport.retry_while_full(lambda: read(file, channel.down, answer, sent.message, device))

    def _among_neighbours(
        self, key: ExchangeKey, wire: Any, sporadic: bool
    ) -> tuple[MessageFile, dict[int, MessageFile], csr_array]:
        """The node's message as it was sent, those that came, by number, and the weights of both."""
        weights = self.now.weights
        assert weights is not None
        if not sporadic:
            return (*self._named(broadcast, key, wire, self.neighbours), weights)
        self.draws += 1
        context = self.context
        available = context.network.available_links(context.seed, context.round, self.draws)
        own = (self.now.links() == context.node).any(1)
        drawn = [j for j in self.neighbours if (self._link(j) & available & own).any()]
        own_file, received = self._named(broadcast_available, key, wire, drawn)
        took_part = np.zeros(len(available), dtype=bool)
        for j in received:
            took_part |= self._link(j)
        # This node's row depends on its own links only.
        return own_file, received, self.now.weights_over(took_part | ~own)

    def _named(
        self, send: Broadcast, key: ExchangeKey, wire: Any, numbers: list[int]
    ) -> tuple[MessageFile, dict[int, MessageFile]]:
        names = self.context.names
        own_file, received = send(self.transport, key, wire, [names[j] for j in numbers])
        return own_file, {j: received[names[j]] for j in numbers if names[j] in received}

    def coin(self, probability: float) -> bool:
        self.draws += 1
        return coin(self.context.seed, self.context.round, self.draws, probability)

    @cached_property
    def edges(self) -> NodeEdges:
        if self.context.network.sequence is not None:
            raise HoldfastError(
                "network: a method that keeps vectors for its links needs links that stay the same"
            )
        return NodeEdges(self)

    def _next_key(self) -> ExchangeKey:
        self.exchanges += 1
        return self.context.message_round, self.exchanges - 1

    def _link(self, other: int) -> np.ndarray:
        """Which of all links, [E], is the one to ``other``."""
        node = self.context.node
        ends = (min(node, other), max(node, other))
        return np.asarray((self.now.links() == ends).all(1))


@dataclass(frozen=True)
class NodeInbox(Generic[M]):
    """What a node received from its neighbours in one exchange. It holds files: messages may be large."""

    like: M  # a message, on the device "meta"
    wire: Any  # how it travelled, likewise
    device: torch.device
    weights: dict[int, float]  # of this node and of all whose messages came
    senders: list[int]  # those others
    files: dict[int, MessageFile]  # of this node and of the others
    channel: Channel
    retry: Callable[[Callable[[], Any]], Any]
    rule: Aggregation

    @cached_property
    def mixed(self) -> M:
        mixed: M = self.retry(partial(self._sum, self.weights) if self.rule.plain else self._judged)
        return mixed

    @cached_property
    def neighbour_sum(self) -> M:
        total: M = self.retry(partial(self._sum, dict.fromkeys(self.senders, 1.0)))
        return total

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
        node = self.peers.context.node
        signs = [1.0 if node > other else -1.0 for other in self.peers.neighbours]
        return torch.tensor(signs).to(self.peers.like)[:, None]

    @cached_property
    def degree(self) -> Tensor:
        degrees = self.peers.now.degrees
        larger = [max(degrees[self.peers.context.node], degrees[other]) for other in self.peers.neighbours]
        return torch.tensor(np.array(larger)).to(self.peers.like)[:, None]

    def spread(self, x: Tensor) -> Tensor:
        return x.expand(len(self.peers.neighbours), -1)

    def total(self, z: Tensor) -> Tensor:
        return z.sum(0, keepdim=True)

    def swap(self, z: Tensor) -> Tensor:
        peers, context, transport = self.peers, self.peers.context, self.peers.transport
        run = context.channel_run
        sent = run.swap(z, torch.zeros(len(z), dtype=torch.int64, device=z.device))
        run.check()
        context.traffic.count(len(z), z, sent.wire)
        names, key = [context.names[j] for j in peers.neighbours], peers._next_key()
        rows = {n: tree_map(lambda t, i=i: t[i : i + 1], sent.wire) for i, n in enumerate(names)}
        published = {name: transport.publish(key, row, name) for name, row in rows.items()}
        received = transport.fetch(key, names, specs(next(iter(rows.values()))) if rows else [])
        for name, file in received.items():
            transport.exchanged(name, key[0], [published[name].header.content], [file.header.content])
        return transport.retry_while_full(
            lambda: torch.cat([read(received[n], run.channel, rows[n], z[:1], z.device) for n in names])
        )


Broadcast = Callable[
    [Exchange, ExchangeKey, Any, Sequence[str]], tuple[MessageFile, dict[str, MessageFile]]
]  # the own message as it was sent, and what came


def broadcast(
    transport: Exchange, key: ExchangeKey, wire: Any, names: Sequence[str]
) -> tuple[MessageFile, dict[str, MessageFile]]:
    """Sends one message to all of ``names``; as it was sent, and theirs."""
    published = transport.publish(key, wire)
    return _exchanged(transport, key, published, transport.fetch(key, names, published.header.tensors))


def broadcast_available(
    transport: Exchange, key: ExchangeKey, wire: Any, names: Sequence[str]
) -> tuple[MessageFile, dict[str, MessageFile]]:
    """``broadcast``, but without those with whom it did not work out, at either end."""
    published = transport.publish(key, wire)
    return _exchanged(
        transport, key, published, transport.fetch_available(key, names, published.header.tensors)
    )


def _exchanged(
    transport: Exchange, key: ExchangeKey, published: MessageFile, received: dict[str, MessageFile]
) -> tuple[MessageFile, dict[str, MessageFile]]:
    for name, file in received.items():
        transport.exchanged(name, key[0], [published.header.content], [file.header.content])
    return transport.intact(published), received
