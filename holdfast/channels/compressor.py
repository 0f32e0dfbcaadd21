"""Channels that send fewer bits: a compressor, and what is done about the part that it leaves out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import ClassVar, Literal

from torch import Tensor

from holdfast.contract.channel import Channel, ChannelState, Draw, Message, Mixing, Use, Wire
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.core.validation import Probability

Uniforms = Callable[[int], Tensor]  # so many numbers in [0, 1) for every row, [m, size]; others in each call
Gamma = Probability | Literal["safe", "tuned"]
Made = Callable[["Compressor", Mixing], Channel]

FORMS: dict[str, Made] = {}  # of error feedback, by ``Mixing.by``


def feedback(by: str) -> Callable[[Made], Made]:
    """Makes a class the form of error feedback for messages that are put together in this way."""

    def add(form: Made) -> Made:
        FORMS[by] = form
        return form

    return add


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
