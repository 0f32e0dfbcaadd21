"""Local solvers: what a node may use to minimise its own objective plus a linear and a quadratic term."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BeforeValidator, InstanceOf
from torch import Tensor

from holdfast.registry import Registry
from holdfast.validation import check_fields


class LocalProblem(Protocol):
    """phi_i(u) = f_i(u) + <linear_i, u> + (weight_i/2) ||u - centre_i||^2, one row ``[..., d]`` per node.

    With ``where`` [..., 1], only the marked rows are computed; the others are zero and cost nothing.
    """

    def value(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """phi_i(u) over all of the node's data, [..., 1]."""

    def grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """Its gradient over all of the node's data."""

    def minibatch_grad(self, u: Tensor, where: Tensor | None = None) -> Tensor:
        """Its gradient on the round's next minibatch."""

    def hessian(self, u: Tensor) -> Tensor:
        """Its Hessian over all of the node's data, [..., d, d]."""


@dataclass(frozen=True)
class Solver(ABC):
    """A way to minimise a ``LocalProblem``, all nodes at once."""

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    @abstractmethod
    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        """The minimiser of every row, as exactly as the solver's options say, from ``start`` [..., d]."""


SOLVERS: Registry[Solver] = Registry("solver")


def _from_config(value: Any) -> Any:
    """``solver = "newton"`` or ``solver = { name = "aogm", tolerance = 1e-12 }`` in an experiment file."""
    if isinstance(value, str):
        return SOLVERS.build(value, {})
    if isinstance(value, dict) and "name" in value:
        options = dict(value)
        return SOLVERS.build(options.pop("name"), options)
    return value


if TYPE_CHECKING:
    LocalSolver = Solver
else:
    LocalSolver = Annotated[InstanceOf[Solver], BeforeValidator(_from_config)]
