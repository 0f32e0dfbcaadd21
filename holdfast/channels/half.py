"""Half precision on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.contract.channel import CHANNELS, EVERY_USE, Channel, ChannelState, Draw, Message, Wire
from holdfast.core.tree import tree_map


@CHANNELS.register("half")
@dataclass(frozen=True)
class Half(Channel):
    """Numbers travel as float16 and are added up in the model's own type.

    Between neighbours a node keeps at home what its own message lost, m_i - own_i. So the sum over all nodes
    is that of the messages before they were rounded. A server's answer is rounded, and alike for all.
    """

    serves = EVERY_USE
    columnwise = True
    overflow = "a number is beyond 65504"

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        return tree_map(lambda t: t.to(torch.float16), message)

    def decode(self, wire: Wire, like: Message) -> Message:
        return tree_map(lambda t, numbers: numbers.to(t.dtype), like, wire)

    def combine(
        self, message: Message, own: Message, mixed: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        return tree_map(lambda m, sent, w: w + (m - sent), message, own, mixed), receiver

    def neighbour_sum(self, message: Message, own: Message, total: Message, degree: Tensor) -> Message:
        return tree_map(lambda m, sent, others: others + degree * (m - sent), message, own, total)

    @property
    def down(self) -> Channel:
        return self
