"""Channels: what happens to a message between ``exchange`` and the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from pydantic import BeforeValidator, InstanceOf
from torch import Tensor

from holdfast.core.randomness import RandomStream, Word, uniform
from holdfast.core.registry import NotInherited, Registry
from holdfast.core.tree import Tree
from holdfast.core.validation import check_fields

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Message: TypeAlias = Tree  # a tensor [m, d] or a NamedTuple of them: one row per sender
Wire: TypeAlias = Tree  # what travels: a tree of tensors of any type, one row per sender
ChannelState: TypeAlias = (
    Tree  # what a channel remembers from round to round: a tree of tensors, () if nothing
)

Use = Literal[
    "graph", "changing graph", "server", "cohort", "neighbour sums", "links", "warm start", "robust rules"
]
Compensated = bool | frozenset[str]  # of all of a message, or of the fields that are named
EVERY_USE: frozenset[Use] = frozenset(Use.__args__)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Mixing:
    """How the messages of a run are put together, for a channel that depends on it."""

    by: Literal["neighbours", "an averaging server", "a leading server"]
    nodes: int
    weights: csr_array | None = None  # W, [nodes, nodes]; None with a server, where W = 11^T / n
    compensated: Compensated = False  # ``Capabilities.compensates``: no feedback is needed there
    twice: float = 0.0  # ``Capabilities.integrates_twice``

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixing) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """Equal where messages are put together alike, so that what is found by trial is found once."""
        parts = () if self.weights is None else (self.weights.indptr, self.weights.indices, self.weights.data)
        return (self.by, self.nodes, self.compensated, self.twice, *(part.tobytes() for part in parts))

    @property
    def norm(self) -> float:
        """The largest eigenvalue of I - W, or a bound: by Gershgorin it is at most 2 max_i (1 - W_ii)."""
        return 1.0 if self.weights is None else 2.0 * float(1 - self.weights.diagonal().min())


@dataclass(frozen=True)
class Draw:
    """Random numbers for one message: the same wherever the sender's row is computed."""

    seed: int
    round: Word
    exchange: int  # the number of the exchange within the round
    nodes: Tensor  # [m]: the senders; a server has the number after the last node's

    def uniform(self, size: int, part: int = 0) -> Tensor:
        """[m, size]: float64 in [0, 1). ``part``, below 256, tells several draws for a message apart."""
        index = (self.nodes[:, None] << 32) + torch.arange(size, device=self.nodes.device)
        return uniform(self.seed, RandomStream.CHANNEL, self.round, 256 * self.exchange + part, index)


@dataclass(frozen=True)
class Channel(NotInherited, ABC):
    """A way to send messages in fewer bytes. Its parameters are plain numbers.

    A sender computes ``encode`` and ``update``, a receiver ``decode``. What neighbours sent is put together
    by ``combine``, what came back from a server by ``average``, what a leading server takes in by ``gather``.
    Every function maps rows to rows, without regard to other rows. The shapes and types of a wire depend on
    those of the message only, and a row of each of its tensors has at least one dimension.

    What is remembered is kept for every exchange of a round, the first, the second and so on, and saved with
    the method's state. Exchanges before the first round remember nothing of one another.
    """

    _promises = ("serves", "transparent", "columnwise")
    serves: ClassVar[frozenset[Use]] = frozenset()  # what it is made for; anything else is refused
    transparent: ClassVar[bool] = False  # True: messages travel as they are, and nothing is computed
    columnwise: ClassVar[bool] = False  # True: no number depends on how many columns d a row has
    overflow: ClassVar[str] = "a finite number does not arrive as one"  # says what is wrong if that happens

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    def placed(self, mixing: Mixing) -> Channel:
        """The channel as it is used where messages are put together by ``mixing``."""
        return self

    @property
    def chosen(self) -> Channel:
        """The channel that was ``placed``: what the user knows of."""
        return self

    @property
    def keeps_zeros(self) -> bool:
        """Whether an entry that is zero arrives as zero."""
        return self.transparent

    @abstractmethod
    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        """What travels, and is counted."""

    @abstractmethod
    def decode(self, wire: Wire, like: Message) -> Message:
        """What a receiver makes of ``wire``: a message of the shapes and types of ``like``."""

    def init(self, message: Message) -> ChannelState:
        """What a sender remembers before its first ``message``, which is given for its shape."""
        return ()

    def update(self, message: Message, own: Message, state: ChannelState) -> ChannelState:
        """What a sender remembers once ``message`` was sent and arrived as ``own``."""
        return state

    def init_receiver(self, message: Message) -> ChannelState:
        """What a receiver remembers before the first message; ``message`` is given for its shape."""
        return ()

    def combine(
        self, message: Message, own: Message, mixed: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        """``mixed`` as the method sees it, and what is remembered of it.

        ``mixed`` is sum_j W_ij m_j of the messages as they arrived, ``own`` the node's own as it arrived
        elsewhere, and ``sender`` is what ``update`` returned. A sum over all nodes that equals that of the
        messages keeps what a method keeps, such as duals that sum to zero.
        """
        return mixed, receiver

    def average(
        self, message: Message, own: Message, mean: Message, sender: ChannelState, receiver: ChannelState
    ) -> tuple[Message, ChannelState]:
        """``combine`` for the mean that came back from a server; by default it is alike for all nodes."""
        return mean, receiver

    def gather(self, mean: Message, receiver: ChannelState, share: float) -> tuple[Message, ChannelState]:
        """``combine`` for a server that leads: it sees the mean of what arrived from a ``share`` of clients.

        ``mean`` and ``receiver`` are the server's own and have no rows.
        """
        return mean, receiver

    def neighbour_sum(self, message: Message, own: Message, total: Message, degree: Tensor) -> Message:
        """The neighbours' sum as the method sees it; ``total`` is that of the messages as they arrived."""
        return total

    @property
    def down(self) -> Channel:
        """How a server's answer travels: a channel that remembers nothing."""
        return IDENTITY


CHANNELS: Registry[Channel] = Registry("channel")

if TYPE_CHECKING:
    ChosenChannel = Channel
else:
    ChosenChannel = Annotated[InstanceOf[Channel], BeforeValidator(CHANNELS.chosen)]


@CHANNELS.register("identity")
@dataclass(frozen=True)
class Identity(Channel):
    """Messages travel as they are."""

    serves = EVERY_USE
    transparent = True
    columnwise = True

    def encode(self, message: Message, state: ChannelState, draw: Draw) -> Wire:
        return message

    def decode(self, wire: Wire, like: Message) -> Message:
        return wire


IDENTITY = Identity()
