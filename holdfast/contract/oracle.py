"""What a node can ask of its own objective."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from holdfast.contract.solver import Solver
from holdfast.contract.steps import LocalSteps, Steps


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
        """Weights like ``x`` [..., d]: which of its entries this client sends, drawn anew in every round.

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
