"""What is done about the part of a message that a compressor C leaves out: it is remembered, and sent later.

There are three forms, for the three ways in which messages are put together. All of them give the method, in
the end, the sums that it would have without a channel, so that what it keeps (duals that sum to zero, a
server's mean of all clients) is kept. What is added up over rounds is kept in float64: rounded to float32 in
every round, the copies of one message at different nodes would drift apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.channel import Channel, ChannelState, Draw, Message, Mixing, Wire
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map

if TYPE_CHECKING:
    from holdfast.channels.compressor import Compressor

TRIALS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.03, 0.02)
TRIAL_ROUNDS = 100
MARGIN = 0.9
TRIAL_NUMBERS = 2**13  # of all nodes' vectors in a trial


def zeros(message: Message) -> Message:
    """Like ``message``, in float64."""
    return tree_map(lambda t: torch.zeros_like(t, dtype=torch.float64), message)


def like(tree: Message, message: Message) -> Message:
    """``tree`` in the number types of ``message``."""
    return tree_map(lambda t, m: t.to(m.dtype), tree, message)


@dataclass(frozen=True)
class Form(Channel):
    """A compressor with a memory."""

    compressor: Compressor
    mixing: Mixing

    def __post_init__(self) -> None:
        """Checks nothing: both were checked by those who made them."""

    @property
    def chosen(self) -> Channel:
        return self.compressor

    def decode(self, wire: Wire, like: Message) -> Message:
        return self.compressor.decode(wire, like)

    def step(self, d: int) -> float:
        """The step gamma for vectors of ``d`` numbers."""
        gamma = self.compressor.gamma
        if gamma == "safe":
            return safe_step(self.compressor.delta(d), self.mixing.norm)
        return tuned_step(self, d) if gamma == "tuned" else gamma


class PublicCopies(Form):
    """Between neighbours: node i and its neighbours keep a copy h_i of what they know of its message m_i.

    It sends C(m_i - h_i), which all add to their copies, and the method sees
    m_i + gamma (sum_j W_ij h_j - h_i). W is doubly stochastic, so the sum over nodes is that of the messages,
    in every round and whatever C leaves out. A node keeps h_i and sum_j W_ij h_j.
    """

    serves = frozenset({"graph", "warm start"})

    def init(self, message: Message) -> ChannelState:
        for tensor in leaves(message):
            self.step(tensor.shape[-1])  # a tuned one is found here, before rounds are traced
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

        def seen(m: Tensor, h: Tensor, others: Tensor) -> Tensor:
            return m + self.step(m.shape[-1]) * (others - h).to(m.dtype)

        return tree_map(seen, message, sender, known), known


class Owing(NamedTuple):
    """What a node behind an averaging server remembers."""

    known: Message  # h_i: what the server's mean holds of this node
    owed: Message  # s_i: the sum over all rounds of m_i - h_i, what the mean lacked so far


class CommonMean(Form):
    """Behind a server that averages: everybody hears the mean of the copies h_i.

    A copy lags behind its message m_i, and methods add up means over rounds, so the sum s_i of the lags is
    sent as well, little by little: a node sends C(m_i + gamma s_i - h_i). Without it the duals of Local
    G-ECL, VRL-SGD and Scaffnew would not sum to zero, and they would miss the optimum.
    """

    serves = frozenset({"server"})

    def init(self, message: Message) -> ChannelState:
        for tensor in leaves(message):
            self.step(tensor.shape[-1])
        return Owing(zeros(message), zeros(message))

    def init_receiver(self, message: Message) -> ChannelState:
        return zeros(message)

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        def rest(m: Tensor, known: Tensor, owed: Tensor) -> Tensor:
            return (m + self.step(m.shape[-1]) * owed - known).to(m.dtype)

        return self.compressor.encode(tree_map(rest, message, *state), (), draw)

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        known = tree_map(torch.add, state.known, own)
        return Owing(known, tree_map(lambda owed, m, h: owed + (m - h), state.owed, message, known))

    def average(
        self, message: Message, own: Message, mean: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        known = tree_map(torch.add, receiver, mean)
        return like(known, message), known


class ErrorFeedback(Form):
    """With a server that leads: its clients send increments, and what was left out is added to the next one.

    A client sends C(m_i + e_i) and remembers what that lacks as e_i. The sum over all rounds is that of the
    messages but for e_i. It holds for cohorts as well: clients that are absent keep their e_i.
    """

    serves = frozenset({"server", "cohort", "robust rules"})

    def init(self, message: Message) -> ChannelState:
        return tree_map(torch.zeros_like, message)

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        return self.compressor.encode(tree_map(torch.add, message, state), (), draw)

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        return tree_map(lambda m, e, q: m + e - q, message, state, own)


FORMS: dict[str, type[Form]] = {
    "neighbours": PublicCopies,
    "an averaging server": CommonMean,
    "a leading server": ErrorFeedback,
}


def safe_step(delta: float, norm: float) -> float:
    """A little below the largest gamma for which mixing is stable with every C of quality ``delta``.

    Let e = x - h be what C has left out, and L = I - W. Mixing gives x' = x - gamma L (x - e), so the next
    C is given x' - h = e - gamma L (x - e). For an eigenvalue mu of L and g = gamma mu, that is e times
    ((1 + g) z - 1) / (z - 1 + g) / z as a transfer function, whose gain is largest at z = -1:
    (2 + g) / (2 - g). C leaves at most sqrt(1 - delta) of its input. By the small-gain theorem the loop is
    stable if the product of the two is below 1. ``norm`` is the largest mu. What ``CommonMean`` owes obeys
    the same equation with mu = 1.
    """
    lost = math.sqrt(1 - delta)
    return min(1.0, MARGIN * 2 * (1 - lost) / (1 + lost) / norm)


@lru_cache(maxsize=64)
def tuned_step(form: Form, d: int) -> float:
    """The step after which random vectors of about ``d`` numbers have come nearest to what they should be.

    Deterministic, on a CPU, so that everybody finds the same.
    """
    nodes, safe = form.mixing.nodes, safe_step(form.compressor.delta(d), form.mixing.norm)
    size = form.compressor.trial_size(d, max(64, TRIAL_NUMBERS // nodes))
    if d < 3:
        return safe
    if nodes * size > 2**22:
        raise HoldfastError(
            f"{type(form.compressor).__name__}.gamma: {nodes} vectors of {size} numbers are too many to find "
            'a tuned step for; give a number, or "safe"'
        )
    best, least, worse = safe, math.inf, 0
    for gamma in (*(trial for trial in TRIALS if trial > safe), safe):
        left = _trial(replace(form, compressor=replace(form.compressor, gamma=gamma)), size)
        if left < least:
            best, least, worse = gamma, left, 0
        elif least < math.inf and (worse := worse + 1) == 2:
            break
    # Behind a server, methods differ more from the trial: FedLin diverged with the full step.
    return best if form.mixing.weights is not None else max(safe, best / 2)


def _trial(form: Form, d: int) -> float:
    """How far nodes are from where they should be after a number of rounds.

    Neighbours only mix, and should come to their mean. Behind a server each node has a quadratic of its own
    and a dual, as methods do that add up means: x is the mean of p = x - a (x - b) - y, and y' = y + p - x.
    """
    nodes, weights = torch.arange(form.mixing.nodes), form.mixing.weights
    x, centre = (Draw(0, 2**31, part, nodes).uniform(d) - 0.5 for part in range(2))
    rate, y = Draw(0, 2**31, 2, nodes).uniform(1), torch.zeros_like(x)
    goal = x.mean(0) if weights is not None else (rate * centre).sum(0) / rate.sum()
    largest = 1e3 * x.norm()
    sender, receiver = form.init(x), form.init_receiver(x)
    for round in range(TRIAL_ROUNDS):
        message = x if weights is not None else x - rate * (x - centre) - y
        own = form.decode(form.encode(message, sender, Draw(0, round, 0, nodes)), message)
        sender = form.update(message, own, sender)
        if weights is not None:
            mixed = torch.from_numpy(weights @ own.numpy())
            x, receiver = form.combine(message, own, mixed, sender, receiver)
        else:
            x, receiver = form.average(message, own, own.mean(0).expand_as(own), sender, receiver)
            y = y + message - x
        if not x.norm() < largest:
            return math.inf
    return float((x - goal).norm())
