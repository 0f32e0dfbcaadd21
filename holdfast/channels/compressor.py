"""Channels that send fewer bits: a compressor, and what is done about the part that it leaves out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.channels.step import Step, find_step
from holdfast.contract.channel import Channel, ChannelState, Draw, Message, Mixing, Use, Wire
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.core.validation import Probability

# --- what is done about the part of a message that a compressor C leaves out: it is remembered, and sent


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
    fixed: Step | None = None  # the step of a trial

    def __post_init__(self) -> None:
        """Checks nothing: both were checked by those who made them."""

    @property
    def chosen(self) -> Channel:
        return self.compressor

    def decode(self, wire: Wire, like: Message) -> Message:
        return self.compressor.decode(wire, like)

    def step(self, d: int) -> Step:
        """The step for vectors of ``d`` numbers."""
        return self.fixed or find_step(self, d)

    def find_steps(self, message: Message) -> None:
        """Those for ``message``, found here if they need trials, before rounds are traced."""
        for tensor in leaves(message):
            self.step(tensor.shape[-1])


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


class CommonMean(Form):
    """Behind a server that averages: everybody hears the mean of the copies h_i.

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


FORMS: dict[str, type[Form]] = {
    "neighbours": PublicCopies,
    "an averaging server": CommonMean,
    "a leading server": ErrorFeedback,
}


# --- channels that send fewer bits: a compressor, and what is done about the part that it leaves out ----


Uniforms = Callable[[int], Tensor]  # so many numbers in [0, 1) for every row, [m, size]; others in each call
Gamma = Probability | Literal["safe", "tuned"]

# What a coarse compressor serves without feedback: all but methods that have a vector for every link.
COARSE: frozenset[Use] = frozenset(
    {"graph", "changing graph", "server", "cohort", "warm start", "robust rules"}
)


@dataclass(frozen=True)
class Compressor(Channel):
    """A map C of vectors with ||C(x) - x||^2 <= (1 - delta) ||x||^2, at least on average.

    With ``feedback``, what C leaves out is sent later, in the form that fits the network (``feedback.py``),
    and ``gamma`` is its step: a number, "safe" (small enough for every message, by the small-gain theorem) or
    "tuned" (what mixes random vectors fastest on this network). Without it every message is compressed by
    itself, and what C leaves out never reaches others.
    """

    gamma: Gamma = field(default="safe", kw_only=True)
    feedback: bool | None = field(default=True, kw_only=True)  # None: only behind a server that averages

    numeric: ClassVar[bool] = False  # True: wires have ``numbers`` [m, k] that may be compressed in turn

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.feedback and self.gamma != "safe":
            raise HoldfastError(
                f"{type(self).__name__}.gamma: it is the step of error feedback, got {self.gamma!r} without; "
                "leave it out, or give feedback=True"
            )

    @abstractmethod
    def compress(self, x: Tensor, uniforms: Uniforms) -> Wire:
        """What travels of the rows ``x`` [m, d]."""

    @abstractmethod
    def expand(self, wire: Wire, like: Tensor) -> Tensor:
        """C(x), with the shape and type of ``like`` [m, d]."""

    @abstractmethod
    def delta(self, d: int) -> float:
        """A lower bound of delta for vectors of ``d`` numbers, above 0."""

    def numbers(self, d: int) -> int:
        """How many numbers [m, k] are left of vectors of ``d``, if it is ``numeric``."""
        raise NotImplementedError

    def trial_size(self, d: int, most: int) -> int:
        """How long vectors must be, at ``most`` if that will do, to behave like those of ``d`` numbers."""
        return min(d, most)

    def placed(self, mixing: Mixing) -> Channel:
        if isinstance(self.gamma, float) and mixing.by == "a leading server":
            raise HoldfastError(
                f"{type(self).__name__}.gamma: where a server leads, what was left out is added to the next "
                "message, and there is no step; leave gamma out"
            )
        if self.feedback is None:
            return replace(self, feedback=mixing.by == "an averaging server").placed(mixing)
        needed = self.feedback and mixing.compensated is not True
        return FORMS[mixing.by](self, mixing) if needed else self

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        parts = count()
        return tree_map(lambda m: self.compress(m, lambda size: draw.uniform(size, next(parts))), message)

    def decode(self, wire: Wire, like: Message) -> Message:
        return tree_map(lambda t, part: self.expand(part, t), like, wire)

    def combine(
        self, message: Message, own: Message, mixed: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        """Without feedback. A node keeps m_i - C(m_i), so that the sum over nodes is that of the messages."""
        return tree_map(lambda m, sent, w: w + (m - sent), message, own, mixed), receiver

    def neighbour_sum(self, message: Message, own: Message, total: Message, degree: Tensor) -> Message:
        return tree_map(lambda m, sent, others: others + degree * (m - sent), message, own, total)
