"""Local solves by gradient steps, for FedPD and FedDyn, and the check of the options that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol

from torch import Tensor

from holdfast.contract import (
    LocalOptimizer,
    LocalSteps,
    Memory,
    Method,
    Oracle,
)
from holdfast.core.errors import HoldfastError
from holdfast.solvers import LocalProblem, Solver


class StepsByOptimizer(Protocol):
    """What ``gradient_steps`` reads of a method."""

    @property
    def solver(self) -> str | Solver: ...
    @property
    def lr(self) -> float | None: ...
    @property
    def local_steps(self) -> LocalSteps: ...
    @property
    def optimizer(self) -> LocalOptimizer: ...


def gradient_steps(
    method: StepsByOptimizer,
    oracle: Oracle,
    linear: Tensor,
    centre: Tensor,
    weight: float,
    start: Tensor,
    memory: Memory,
) -> tuple[Tensor, Memory]:
    """Steps of the method's optimiser on f_i(u) + <linear, u> + (weight/2) ||u - centre||^2."""
    assert method.lr is not None
    own = oracle.grad if method.solver == "sgd" else oracle.full_grad

    def gradient(u: Tensor) -> Tensor:
        return own(u) + (linear + weight * (u - centre))

    steps = oracle.steps(method.local_steps)
    return method.optimizer.descend(start, gradient, method.lr, steps, memory)


@dataclass(frozen=True)
class GradientSteps(Solver):
    """One gradient step of each of the ``rates``; a node that is done early costs no further gradients."""

    rates: list[float]
    minibatch: bool = False  # or all of the node's data for every gradient
    tolerance: float = 0.0  # a node is done when its squared gradient is within it; 0: never

    def __post_init__(self) -> None:
        """Checks nothing: methods make it from their own, checked hyperparameters (or buffers for these)."""

    @property
    def adaptive(self) -> bool:
        return bool(self.tolerance)

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        gradient = problem.minibatch_grad if self.minibatch else problem.grad
        u, busy = start, None
        for rate in self.rates:
            slope = gradient(u, busy)
            if self.tolerance:
                busy = ~(slope.square().sum(-1, keepdim=True) <= self.tolerance)
                if not busy.any():
                    break
                slope = slope * busy
            u = u - rate * slope
        if busy is not None:
            problem.report_unfinished(busy)
        return u


def check_solver_options(method: Method, solver: str | Solver, uses: Mapping[str, tuple[str, ...]]) -> None:
    """Refuses what the chosen ``solver`` would ignore, and a missing ``lr``.

    ``uses`` names for each solver the hyperparameters that it reads; the others must stay at their defaults.
    A ``Solver`` brings its own and reads none of them.
    """
    name = type(method).__name__
    read = () if isinstance(solver, Solver) else uses[solver]
    options = {option for used in uses.values() for option in used}
    for field in fields(method):
        given = getattr(method, field.name)
        if field.name in options and field.name not in read and given != field.default:
            users = " or ".join(repr(other) for other, used in uses.items() if field.name in used)
            raise HoldfastError(
                f"{name}.{field.name}: the solver {solver!r} does not use it, got {given!r}; leave it out or "
                f"choose the solver {users}"
            )
    if "lr" in read and vars(method)["lr"] is None:
        raise HoldfastError(f"{name}.lr: the solver {solver!r} needs a step size; give lr, such as 0.01")
