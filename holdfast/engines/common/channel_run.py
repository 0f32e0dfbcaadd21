"""The channel in one round: what travels of each message, what arrives, and what the channel remembers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from holdfast.contract import Channel, Draw, Inbox, Peers
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import Word
from holdfast.core.tree import Tree, has_leaves, leaves, tree_map

M = TypeVar("M")


class ChannelMemory(NamedTuple):
    """What the channel remembers of one exchange of every round."""

    sender: Tree
    receiver: Tree


class WithChannelState(NamedTuple):
    """The state of a method, and beside it what its channel remembers."""

    state: Tree
    channel: Tree


def with_channel_state(state: Tree, channel: Tree) -> Tree:
    """Both as one tree; the method's own where the channel remembers nothing."""
    return WithChannelState(state, channel) if has_leaves(channel) else state


def split_channel_state(state: Tree) -> tuple[Tree, Tree]:
    """The inverse of ``with_channel_state``."""
    return (state.state, state.channel) if isinstance(state, WithChannelState) else (state, ())


def new_memories(channel: Channel, messages: Iterable[Tree]) -> tuple[ChannelMemory, ...]:
    """Those for the ``messages`` of a round; none if the channel remembers nothing."""
    memories = tuple(
        ChannelMemory(channel.init(message), channel.init_receiver(message)) for message in messages
    )
    return memories if has_leaves(memories) else ()


def server_memory(*memories: ChannelMemory) -> ChannelMemory | tuple[()]:
    """What it remembers where a server leads, which is the only receiver: its part has no rows."""
    return memories[0]._replace(receiver=tree_map(lambda t: t[0], memories[0].receiver)) if memories else ()


Listener = Callable[[Tree, Tensor], None]
"""Receives what arrives of every message, rows [m, ...], and the senders [m]; in stepwise rounds only."""


class Sent(NamedTuple):
    """A message on its way."""

    message: Tree
    wire: Tree
    arrived: Tree  # what receivers make of it


@dataclass(frozen=True)
class Received(Generic[M]):
    """What a method sees of an exchange."""

    mixed: M
    add_up: Callable[[], M]

    @cached_property
    def neighbour_sum(self) -> M:
        return self.add_up()


class ChannelRun:
    """Carries the messages of ``nodes`` [m] in one round through ``channel``.

    ``memories`` hold what it remembers, one for each exchange in turn; without any, every exchange begins
    again.
    ``lost`` is a flag that is set if a finite number did not arrive as one. It is a tensor: rounds that are
    recorded set it as well.
    """

    def __init__(
        self,
        channel: Channel,
        memories: tuple[ChannelMemory, ...],
        seed: int,
        round: Word,
        nodes: Tensor,
        lost: Tensor,
        listener: Listener | None = None,
    ) -> None:
        self.channel, self._memories, self.nodes, self.lost = channel, list(memories), nodes, lost
        self.listener = listener
        self.seed, self.round = seed, round
        self.exchanges = 0  # of this round so far, those over single links included
        self.sends = 0  # of these, messages to all neighbours: each has its memory
        self.last = ChannelMemory((), ())  # that of the last exchange

    @property
    def memories(self) -> tuple[ChannelMemory, ...]:
        """What is remembered after the exchanges so far."""
        return tuple(self._memories)

    def send(self, message: Tree) -> Sent:
        """``message``, rows [m, ...], encoded; what the sender remembers of it is noted."""
        sent = self._sent(message)
        if self.listener is not None:
            self.listener(sent.arrived, self.nodes)
        return sent

    def _sent(self, message: Tree) -> Sent:
        if self.channel.transparent:
            return Sent(message, message, message)
        if self._memories and self.sends >= len(self._memories):
            raise HoldfastError(
                f"channel {type(self.channel.chosen).__name__}: the method exchanges more often in a round "
                f"than in trial rounds, {len(self._memories)} times; use a channel without memory, such as "
                "'half'"
            )
        fresh = () if self._memories else new_memories(self.channel, [message])
        (memory,) = self._memories[self.sends : self.sends + 1] or fresh or [ChannelMemory((), ())]
        sent = self._through(self.channel, message, memory.sender, self.nodes, self._count())
        self.sends += 1
        self._remember(memory._replace(sender=self.channel.update(message, sent.arrived, memory.sender)))
        return sent

    def swap(self, z: Tensor, rows: Tensor) -> Sent:
        """``z`` [e, d], one row per link; ``rows`` [e]: the row of the node that sends it."""
        if self.channel.transparent:
            return Sent(z, z, z)
        return self._through(self.channel, z, self.channel.init(z), self.nodes[rows], self._count())

    def answer(self, message: Tree, exchange: int, nodes: int) -> Sent:
        """What a server of so many ``nodes`` sends to all nodes; ``message`` has one row."""
        if self.channel.down.transparent:
            return Sent(message, message, message)
        return self._through(self.channel.down, message, (), self.nodes.new_full((1,), nodes), exchange)

    def broadcast(self, message: Tree, nodes: int, exchange: int = 0) -> Sent:
        """``answer`` of a server that leads; ``message`` is the row itself."""
        if self.channel.down.transparent:
            return Sent(message, message, message)
        sent = self.answer(tree_map(lambda t: t[None], message), exchange, nodes)
        return Sent(message, sent.wire, tree_map(lambda t: t[0], sent.arrived))

    def from_neighbours(self, sent: Sent, inbox: Inbox[Any], peers: Peers) -> Inbox[Any]:
        """What the method sees of ``inbox``, which holds what arrived over the links of ``peers``."""
        if self.channel.transparent:
            return inbox
        memory = self.last
        mixed, receiver = self.channel.combine(
            sent.message, sent.arrived, inbox.mixed, memory.sender, memory.receiver
        )
        self._remember(memory._replace(receiver=receiver))
        return Received(
            mixed,
            lambda: self.channel.neighbour_sum(sent.message, sent.arrived, inbox.neighbour_sum, peers.degree),
        )

    def from_server(self, sent: Sent, mean: Tree, nodes: int) -> Inbox[Any]:
        """What the method sees of the server's answer ``mean``, rows [m, ...]."""
        memory = self.last
        mixed, receiver = self.channel.average(
            sent.message, sent.arrived, mean, memory.sender, memory.receiver
        )
        self._remember(memory._replace(receiver=receiver))
        return Received(mixed, lambda: tree_map(lambda m, own: nodes * m - own, mixed, sent.message))

    def check(self) -> None:
        """Raises if a number got lost; reads it from the device."""
        if not self.channel.transparent and bool(self.lost):
            raise lost_error(self.channel)

    def _through(self, channel: Channel, message: Tree, state: Tree, nodes: Tensor, number: int) -> Sent:
        wire = channel.encode(message, state, Draw(self.seed, self.round, number, nodes))
        sent = Sent(message, wire, channel.decode(wire, message))
        for before, after in zip(leaves(sent.message), leaves(sent.arrived), strict=True):
            self.lost.logical_or_((before.isfinite() & ~after.isfinite()).any())
        return sent

    def _count(self) -> int:
        self.exchanges += 1
        return self.exchanges - 1

    def _remember(self, memory: ChannelMemory) -> None:
        self.last = memory
        if self._memories:
            self._memories[self.sends - 1] = memory


def lost_error(channel: Channel) -> HoldfastError:
    chosen = channel.chosen
    return HoldfastError(
        f"channel {type(chosen).__name__}: {chosen.overflow}; use another channel or a smaller lr"
    )


def wire_like(channel: Channel, message: Tree) -> Tree:
    """A tree like what travels of ``message``, rows [m, ...], on the device "meta"."""
    shapes = tree_map(lambda t: torch.empty_like(t, device="meta"), message)
    if channel.transparent or not has_leaves(message):
        return shapes
    (memory,) = new_memories(channel, [shapes]) or [ChannelMemory((), ())]
    rows = len(next(leaves(shapes)))
    draw = Draw(0, 0, 0, torch.zeros(rows, dtype=torch.int64, device="meta"))
    return channel.encode(shapes, memory.sender, draw)
