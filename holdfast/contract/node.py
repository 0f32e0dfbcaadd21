"""What a node can ask of its own objective."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from holdfast.contract.parameters import LocalSteps, Steps
from holdfast.contract.solver import Solver

# --- what a node can ask of its own objective -----------------------------------------------------------


class Oracle(Protocol):
    """A node's view of its own objective f_i. Points and gradients are ``[..., d]``, one row per node."""

    @property
    def round(self) -> int:
        """The current round, counted from 0."""

    def grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """Gradient of f_i at ``x`` on the round's next minibatch (exact if the objective has no batches).

        With ``where`` [..., 1], only the marked rows are computed; the others are zero and cost nothing.
        """

    def grads(self, *points: Tensor) -> tuple[Tensor, ...]:
        """Gradients at several points on the same minibatch, for variance reduction."""

    def full_grad(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """Gradient of f_i at ``x`` over all of the node's data; ``where`` as for ``grad``."""

    def argmin(
        self,
        linear: Tensor,
        centre: Tensor,
        weight: float | Tensor,
        start: Tensor,
        solver: Solver = ...,
        gradient_norm: float | None = None,
    ) -> Tensor:
        """argmin_u f_i(u) + <linear, u> + (weight/2) ||u - centre||^2 from ``start``; by default exactly.

        With ``gradient_norm`` the solver stops at that norm of the gradient instead of by its own rule.
        """

    def coin(self, probability: float) -> bool:
        """A coin that falls alike for all clients of the round's cohort: true with ``probability``."""

    def parts(self, x: Tensor, copies: int) -> Tensor:
        """Weights like ``x`` [..., d]: which of its entries this client sends, drawn again in every round.

        Of the c clients in the cohort, ``copies`` send each entry; their weight is c/copies, that of others
        zero. The mean of weighted messages is then, entry by entry, the mean over those who send it.
        """

    def steps(self, given: LocalSteps) -> Steps:
        """How many local steps the node takes in this round, [..., 1] where the nodes here differ.

        Who has taken its own gets no minibatch any more: its gradients are zero and cost nothing. So only
        the round's last draws of minibatches may be such a local phase.
        """

    @property
    def able(self) -> Tensor:
        """Whether the node is able to compute in this round, [..., 1]; always, unless nodes are sporadic."""

    @property
    def chance(self) -> Tensor:
        """The probability of being ``able``, [..., 1] float64."""


# --- what a node can ask of its links -------------------------------------------------------------------


M = TypeVar("M")  # a message: a tensor [..., d] or a NamedTuple of them
R = TypeVar("R", covariant=True)  # the same, received


class Inbox(Protocol[R]):
    """What a node received in one exchange."""

    @property
    def mixed(self) -> R:
        """sum_j W_ij m_j over the node's neighbours and itself; for a server the mean over all nodes."""

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
        """A coin that falls alike for all nodes: true with ``probability``."""
