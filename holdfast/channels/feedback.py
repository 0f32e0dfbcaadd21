"""What is done about the part of a message that a compressor C leaves out: it is remembered, and sent later.

There are three forms, for the three ways in which messages are put together. All of them give the method, in
the end, the sums that it would have without a channel, so that what it keeps (duals that sum to zero, a
server's mean of all clients) is kept. What is added up over rounds is kept in float64: rounded to float32 in
every round, the copies of one message at different nodes would drift apart.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.channels.compressor import feedback
from holdfast.channels.step import Form
from holdfast.contract.channel import ChannelState, Draw, Message, Wire
from holdfast.core.tree import tree_map


def zeros(message: Message) -> Message:
    """Like ``message``, in float64."""
    return tree_map(lambda t: torch.zeros_like(t, dtype=torch.float64), message)


def like(tree: Message, message: Message) -> Message:
    """``tree`` in the number types of ``message``."""
    return tree_map(lambda t, m: t.to(m.dtype), tree, message)


@feedback("neighbours")
class PublicCopies(Form):
    """Between neighbours: node i and its neighbours keep a copy h_i of what they know of its message m_i.

    It sends C(m_i - h_i), which all add to their copies, and the method sees
    m_i + gamma (sum_j W_ij h_j - h_i), or with a lead what ``Step`` says. W is doubly stochastic, so the sum
    over nodes is that of the messages, in every round and whatever C leaves out. A node keeps h_i and
    sum_j W_ij h_j.
    """

    serves = frozenset({"graph", "warm start"})

    def init(self, message: Message) -> ChannelState:
        self.find_steps(message)
        return zeros(message)

    def init_receiver(self, message: Message) -> ChannelState:
        return zeros(message)

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        return self.compressor.encode(like(tree_map(torch.sub, message, state), message), (), draw)

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        return tree_map(torch.add, state, own)

    def combine(
        self, message: Message, own: Message, mixed: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        known = tree_map(torch.add, receiver, mixed)

        def seen(m: Tensor, h: Tensor, others: Tensor, own: Tensor, mixed: Tensor) -> Tensor:
            gamma, lead = self.step(m.shape[-1])
            difference = others - h
            if lead:
                difference = (difference + lead * (mixed - own)) / (1 + lead)
            return m + gamma * difference.to(m.dtype)

        return tree_map(seen, message, sender, known, own, mixed), known


class Owing(NamedTuple):
    """What a node behind an averaging server remembers."""

    known: Message  # h_i: what the server's mean holds of this node
    owed: Message  # s_i: the sum over all rounds of m_i - h_i, what the mean lacked so far


@feedback("an averaging server")
class CommonMean(Form):
    """Behind a server that averages: all nodes receive the mean of the copies h_i.

    A copy lags behind its message m_i, and methods add up means over rounds, so the sum s_i of the lags is
    sent as well, little by little: a node sends C(m_i + gamma s_i - h_i). Without it the duals of Local
    G-ECL, VRL-SGD and Scaffnew would not sum to zero, and they would miss the optimum.
    """

    serves = frozenset({"server"})

    def init(self, message: Message) -> ChannelState:
        self.find_steps(message)
        return Owing(zeros(message), zeros(message))

    def init_receiver(self, message: Message) -> ChannelState:
        return zeros(message)

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        def rest(m: Tensor, known: Tensor, owed: Tensor) -> Tensor:
            return (m + self.step(m.shape[-1]).gamma * owed - known).to(m.dtype)

        return self.compressor.encode(tree_map(rest, message, *state), (), draw)

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        known = tree_map(torch.add, state.known, own)
        return Owing(known, tree_map(lambda owed, m, h: owed + (m - h), state.owed, message, known))

    def average(
        self, message: Message, own: Message, mean: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        known = tree_map(torch.add, receiver, mean)
        return like(known, message), known


@feedback("a leading server")
class ErrorFeedback(Form):
    """With a server that leads: its clients send increments, and what was left out is added to the next one.

    A client sends C(m_i + e_i) and remembers what that lacks as e_i. The sum over all rounds is that of the
    messages but for e_i. It holds for cohorts as well: clients that are absent keep their e_i. Fields of a
    message that the method compensates have no e_i.
    """

    serves = frozenset({"server", "cohort", "robust rules"})

    def init(self, message: Message) -> ChannelState:
        owed = tree_map(torch.zeros_like, message)
        fields = self.mixing.compensated
        return owed._replace(**dict.fromkeys(fields, ())) if isinstance(fields, frozenset) else owed

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        rest = tree_map(lambda m, e: m + e if isinstance(e, Tensor) else m, message, state)
        return self.compressor.encode(rest, (), draw)

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        return tree_map(lambda m, e, q: m + e - q if isinstance(e, Tensor) else (), message, state, own)
