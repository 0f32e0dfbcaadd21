"""Local solvers: what a node may use to minimise its own objective plus a linear and a quadratic term."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import BeforeValidator, InstanceOf
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import check_fields


class LocalProblem(Protocol):
    """phi_i(u) = f_i(u) + <linear_i, u> + (weight_i/2) ||u - centre_i||^2, one row ``[m, d]`` per node.

    With ``where`` [m, 1], only the marked rows are computed; the others are zero and cost nothing.
    """

    @property
    def gradient_norm(self) -> float | None:
        """The norm of grad phi_i to be reached, if the method's theory asks for one (see ``stopping.py``)."""

    @property
    def l1(self) -> float:
        """The weight of ||u||_1 in phi_i; its share in ``grad`` is l1 sign(u), with sign(0) = 0."""

    @property
    def smooth(self) -> bool:
        """Whether phi_i is differentiable apart from its l1 term."""

    def value(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """phi_i(u) over all of the node's data, [m, 1]."""

    def grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """Its gradient over all of the node's data."""

    def minibatch_grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """Its gradient on the round's next minibatch."""

    def hessian(self, u: Tensor) -> Tensor:
        """Its Hessian over all of the node's data, [m, d, d]."""

    def slope(self, u: Tensor) -> Tensor:
        """linear_i + weight_i (u - centre_i): what is added to the gradient of f_i, which costs nothing."""

    def report_unfinished(self, rows: Tensor) -> None:
        """Counts the marked rows [m, 1] as solves that ended before their tolerance was met."""


@dataclass(frozen=True)
class Solver(ABC):
    """A way to minimise a ``LocalProblem``, all nodes at once."""

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        """The minimiser of every row, as exactly as the solver's options say, from ``start`` [m, d].

        Where the problem asks for a ``gradient_norm``, that replaces the solver's own stopping rule.
        """

    @property
    def adaptive(self) -> bool:
        """Whether it takes as many steps as what it sees demands, so that nobody can plan how many."""
        return False


def require_smooth(solver: str, problem: LocalProblem, *, l1: bool = False) -> None:
    """Refuses problems with kinks; ``l1`` says whether the solver can treat an l1 term."""
    if not problem.smooth:
        raise HoldfastError(
            f"the solver {solver!r} needs a smooth loss, and the exact hinge has kinks: give the loss some "
            "smoothing, such as 0.1"
        )
    if problem.l1 and not l1:
        raise HoldfastError(
            f"the solver {solver!r} needs a smooth objective, and this one has l1 = {problem.l1:g}: "
            "choose the solver 'fista'"
        )


SOLVERS: Registry[Solver] = Registry("solver")

if TYPE_CHECKING:
    LocalSolver = Solver
else:
    LocalSolver = Annotated[InstanceOf[Solver], BeforeValidator(SOLVERS.chosen)]
