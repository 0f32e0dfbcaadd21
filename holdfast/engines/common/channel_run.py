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
from holdfast.core.tree import has_leaves, leaves, tree_map

M = TypeVar("M")


class Slot(NamedTuple):
    """What the channel remembers of one exchange of every round."""

    sender: Any
    receiver: Any


class Carried(NamedTuple):
    """The state of a method, and beside it what its channel remembers."""

    state: Any
    channel: Any


def carried(state: Any, channel: Any) -> Any:
    """Both as one tree; the method's own where the channel remembers nothing."""
    return Carried(state, channel) if has_leaves(channel) else state


def apart(state: Any) -> tuple[Any, Any]:
    """The inverse of ``carried``."""
    return (state.state, state.channel) if isinstance(state, Carried) else (state, ())


def new_slots(channel: Channel, messages: Iterable[Any]) -> tuple[Slot, ...]:
    """Those for the ``messages`` of a round; none if the channel remembers nothing."""
    slots = tuple(Slot(channel.init(message), channel.init_receiver(message)) for message in messages)
    return slots if has_leaves(slots) else ()


def server_slot(*slots: Slot) -> Slot | tuple[()]:
    """The slot of a method led by a server, which is the only receiver: its part has no rows."""
    return slots[0]._replace(receiver=tree_map(lambda t: t[0], slots[0].receiver)) if slots else ()


Listener = Callable[[Any, Tensor], None]
"""Is told what arrives of every message, rows [m, ...], and the senders [m]; in stepwise rounds only."""


class Sent(NamedTuple):
    """A message on its way."""

    message: Any
    wire: Any
    arrived: Any  # what receivers make of it


@dataclass(frozen=True)
class Received(Generic[M]):
    """What a method sees of an exchange."""

    mixed: M
    add_up: Callable[[], M]

    @cached_property
    def neighbour_sum(self) -> M:
        return self.add_up()


class Carrier:
    """Carries the messages of ``nodes`` [m] in one round through ``channel``.

    ``slots`` hold what it remembers, one for each exchange in turn; without any, every exchange begins anew.
    ``lost`` is a flag that is set if a finite number did not arrive as one. It is a tensor: rounds that are
    recorded set it as well.
    """

    def __init__(
        self,
        channel: Channel,
        slots: tuple[Slot, ...],
        seed: int,
        round: Word,
        nodes: Tensor,
        lost: Tensor,
        listener: Listener | None = None,
    ) -> None:
        self.channel, self.slots, self.nodes, self.lost = channel, list(slots), nodes, lost
        self.listener = listener
        self.seed, self.round = seed, round
        self.exchanges = 0  # of this round so far, those over single links included
        self.sends = 0  # of these, messages to everybody: each has its slot
        self.slot = Slot((), ())  # that of the last exchange

    @property
    def memory(self) -> tuple[Slot, ...]:
        """What is remembered after the exchanges so far."""
        return tuple(self.slots)

    def send(self, message: Any) -> Sent:
        """``message``, rows [m, ...], encoded; what the sender remembers of it is noted."""
        sent = self._sent(message)
        if self.listener is not None:
            self.listener(sent.arrived, self.nodes)
        return sent

    def _sent(self, message: Any) -> Sent:
        if self.channel.transparent:
            return Sent(message, message, message)
        if self.slots and self.sends >= len(self.slots):
            raise HoldfastError(
                f"channel {type(self.channel.chosen).__name__}: the method exchanges more often in a round "
                f"than in trial rounds, {len(self.slots)} times; use a channel without memory, such as 'half'"
            )
        fresh = () if self.slots else new_slots(self.channel, [message])
        (slot,) = self.slots[self.sends : self.sends + 1] or fresh or [Slot((), ())]
        sent = self._through(self.channel, message, slot.sender, self.nodes, self._count())
        self.sends += 1
        self._remember(slot._replace(sender=self.channel.update(message, sent.arrived, slot.sender)))
        return sent

    def swap(self, z: Tensor, rows: Tensor) -> Sent:
        """``z`` [e, d], one row per link; ``rows`` [e]: the row of the node that sends it."""
        if self.channel.transparent:
            return Sent(z, z, z)
        return self._through(self.channel, z, self.channel.init(z), self.nodes[rows], self._count())

    def answer(self, message: Any, exchange: int, nodes: int) -> Sent:
        """What a server of so many ``nodes`` sends to everybody; ``message`` has one row."""
        if self.channel.down.transparent:
            return Sent(message, message, message)
        return self._through(self.channel.down, message, (), self.nodes.new_full((1,), nodes), exchange)

    def broadcast(self, message: Any, nodes: int, exchange: int = 0) -> Sent:
        """``answer`` of a server that leads; ``message`` is the row itself."""
        if self.channel.down.transparent:
            return Sent(message, message, message)
        sent = self.answer(tree_map(lambda t: t[None], message), exchange, nodes)
        return Sent(message, sent.wire, tree_map(lambda t: t[0], sent.arrived))

    def from_neighbours(self, sent: Sent, inbox: Inbox[Any], peers: Peers) -> Inbox[Any]:
        """What the method sees of ``inbox``, which holds what arrived over the links of ``peers``."""
        if self.channel.transparent:
            return inbox
        slot = self.slot
        mixed, receiver = self.channel.combine(
            sent.message, sent.arrived, inbox.mixed, slot.sender, slot.receiver
        )
        self._remember(slot._replace(receiver=receiver))
        return Received(
            mixed,
            lambda: self.channel.neighbour_sum(sent.message, sent.arrived, inbox.neighbour_sum, peers.degree),
        )

    def from_server(self, sent: Sent, mean: Any, nodes: int) -> Inbox[Any]:
        """What the method sees of the server's answer ``mean``, rows [m, ...]."""
        slot = self.slot
        mixed, receiver = self.channel.average(sent.message, sent.arrived, mean, slot.sender, slot.receiver)
        self._remember(slot._replace(receiver=receiver))
        return Received(mixed, lambda: tree_map(lambda m, own: nodes * m - own, mixed, sent.message))

    def check(self) -> None:
        """Raises if a number got lost; reads it from the device."""
        if not self.channel.transparent and bool(self.lost):
            raise lost_error(self.channel)

    def _through(self, channel: Channel, message: Any, state: Any, nodes: Tensor, number: int) -> Sent:
        wire = channel.encode(message, state, Draw(self.seed, self.round, number, nodes))
        sent = Sent(message, wire, channel.decode(wire, message))
        for before, after in zip(leaves(sent.message), leaves(sent.arrived), strict=True):
            self.lost.logical_or_((before.isfinite() & ~after.isfinite()).any())
        return sent

    def _count(self) -> int:
        self.exchanges += 1
        return self.exchanges - 1

    def _remember(self, slot: Slot) -> None:
        self.slot = slot
        if self.slots:
            self.slots[self.sends - 1] = slot


def lost_error(channel: Channel) -> HoldfastError:
    chosen = channel.chosen
    return HoldfastError(
        f"channel {type(chosen).__name__}: {chosen.overflow}; use another channel or a smaller lr"
    )


def wire_like(channel: Channel, message: Any) -> Any:
    """A tree like what travels of ``message``, rows [m, ...], on the device "meta"."""
    shapes = tree_map(lambda t: torch.empty_like(t, device="meta"), message)
    if channel.transparent or not has_leaves(message):
        return shapes
    (slot,) = new_slots(channel, [shapes]) or [Slot((), ())]
    rows = len(next(leaves(shapes)))
    draw = Draw(0, 0, 0, torch.zeros(rows, dtype=torch.int64, device="meta"))
    return channel.encode(shapes, slot.sender, draw)
