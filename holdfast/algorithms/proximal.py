"""The local problem of primal-dual methods: f_i(u) + <linear, u> + (weight/2) ||u - centre||^2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from holdfast.algorithms.base import Method, Oracle
from holdfast.errors import HoldfastError


@dataclass(frozen=True)
class LocalProblem:
    """What a node adds to its objective f_i; ``linear`` and ``centre`` are ``[..., d]``."""

    linear: Tensor
    centre: Tensor
    weight: float

    def slope(self, u: Tensor, gradient: Tensor) -> Tensor:
        """The problem's gradient at ``u``, where that of f_i is ``gradient``."""
        return gradient + self.linear + self.weight * (u - self.centre)

    def exact(self, start: Tensor, oracle: Oracle) -> Tensor:
        """The minimiser."""
        return oracle.argmin(self.linear, self.centre, self.weight, start)

    def steps(self, start: Tensor, gradient: Callable[[Tensor], Tensor], rates: Iterable[float]) -> Tensor:
        """One step of each of the given ``rates`` with f_i's ``gradient``, full or on a minibatch."""
        u = start
        for rate in rates:
            u = u - rate * self.slope(u, gradient(u))
        return u

    def steps_until(self, tolerance: float, start: Tensor, oracle: Oracle, rates: Iterable[float]) -> Tensor:
        """Steps with full gradients until a node's squared slope is within ``tolerance``, or rates run out.

        A node that is done stays where it is and costs no further gradients.
        """
        u = start
        busy = torch.ones_like(start[..., :1], dtype=torch.bool)
        for rate in rates:
            slope = self.slope(u, oracle.full_grad(u, where=busy))
            busy = busy & ~(slope.square().sum(-1, keepdim=True) <= tolerance)
            if not busy.any():
                break
            u = torch.where(busy, u - rate * slope, u)
        return u


def check_solver_options(method: Method, solver: str, uses: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses what the chosen ``solver`` would ignore, and a missing ``lr``.

    ``uses`` names for each solver the hyperparameters that it reads; the others must stay at their defaults.
    """
    name = type(method).__name__
    options = {option for used in uses.values() for option in used}
    for field in fields(method):
        given = getattr(method, field.name)
        if field.name in options and field.name not in uses[solver] and given != field.default:
            users = " or ".join(repr(other) for other, used in uses.items() if field.name in used)
            raise HoldfastError(
                f"{name}.{field.name}: the solver {solver!r} does not use it, got {given!r}; leave it out or "
                f"choose the solver {users}"
            )
    if "lr" in uses[solver] and vars(method)["lr"] is None:
        raise HoldfastError(f"{name}.lr: the solver {solver!r} needs a step size; give lr, such as 0.01")
