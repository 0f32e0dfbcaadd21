"""Local solves by plain gradient steps of a given length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from holdfast.contract.solver import SOLVERS, LocalProblem, Solver
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, Positive
from holdfast.solvers.iterative import IterativeSolver, Progress, StoppingRule


class _State(NamedTuple):
    answer: Tensor
    energy: Tensor  # [m, 1]: there, if the stopping rule asks for it


@SOLVERS.register("gd")
@dataclass(frozen=True, kw_only=True)
class GradientDescent(IterativeSolver):
    """Gradient descent with a fixed step; ``tolerance = None`` takes exactly ``max_steps`` steps.

    The step must be below 2/(L + weight) for convergence. Objectives with kinks are taken without tolerance
    only: the steps then go along subgradients.
    """

    needs_smoothness: ClassVar[bool] = False

    lr: Positive

    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> _State:
        unknown = start.new_zeros(len(start), 1)
        return _State(start, unknown if rule.energy_change is None else problem.value(start))

    def advance(self, problem: LocalProblem, state: _State, active: Tensor, rule: StoppingRule) -> Progress:
        gradient = problem.grad(state.answer, active)
        small = rule.small_gradient(gradient)
        point = state.answer - self.lr * gradient * ~small
        if rule.energy_change is None:
            return Progress(_State(point, state.energy), small, ~gradient.isfinite().all(-1, keepdim=True))
        energy = problem.value(point, active)
        done = rule.small_change(energy, state.energy)
        return Progress(_State(point, energy), done, ~energy.isfinite())


@SOLVERS.register("sgd")
@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(Solver):
    """Stochastic gradient descent: a fixed number of steps on the round's next minibatches."""

    lr: Positive
    steps: Count

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        if problem.gradient_norm is not None:
            raise HoldfastError(
                "the solver 'sgd' cannot promise an accuracy, and this method asks for one: choose 'aogm'"
            )
        u = start
        for _ in range(self.steps):
            u = u - self.lr * problem.minibatch_grad(u)
        return u
