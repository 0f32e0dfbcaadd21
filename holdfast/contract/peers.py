"""What a node can ask of its links."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

M = TypeVar("M")  # a message: a tensor [..., d] or a NamedTuple of them
R = TypeVar("R", covariant=True)  # the same, received


class Inbox(Protocol[R]):
    """What a node received in one exchange."""

    @property
    def mixed(self) -> R:
        """sum_j W_ij m_j over the node's neighbours and itself; for a server the mean of everybody."""

    @property
    def neighbour_sum(self) -> R:
        """sum_j m_j over the node's neighbours, without itself."""


class Edges(Protocol):
    """A node's links one by one: tensors ``[e, d]`` with one row for each link of each node."""

    @property
    def sign(self) -> Tensor:
        """+1 at the end with the larger node number, -1 at the other, [e, 1]."""

    @property
    def degree(self) -> Tensor:
        """The larger number of neighbours of the two ends, alike at both, [e, 1]."""

    def spread(self, x: Tensor) -> Tensor:
        """The node's row [..., d] at each of its links, [e, d]."""

    def total(self, z: Tensor) -> Tensor:
        """The sum over the node's links, [..., d]."""

    def swap(self, z: Tensor) -> Tensor:
        """Sends each row over its own link and returns what came from the other end, [e, d]."""


class Peers(Protocol):
    """A node's links. Every vector handed to ``exchange`` travels over each of them and is counted."""

    @property
    def degree(self) -> Tensor:
        """Number of neighbours, ``[..., 1]``."""

    @property
    def edges(self) -> Edges:
        """The node's links one by one, for methods that send every neighbour something else."""

    def exchange(self, message: M, sporadic: bool = False) -> Inbox[M]:
        """Sends ``message`` to every neighbour and waits for theirs; ``sporadic``: over available links."""

    def coin(self, probability: float) -> bool:
        """A coin that falls alike for everybody: true with ``probability``."""
