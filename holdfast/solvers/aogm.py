"""AOGM: the optimised gradient method with adaptive restart and full backtracking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.contract.solver import SOLVERS, LocalProblem
from holdfast.solvers.iterative import (
    Accelerated,
    Moving,
    Progress,
    StoppingRule,
    backtrack,
    choose,
    grown,
    next_t,
)


@SOLVERS.register("aogm")
@dataclass(frozen=True, kw_only=True)
class AOGM(Accelerated):
    """Optimised gradient method, adaptive restart, full backtracking: smooth problems, no step to choose.

    Kim and Fessler's OGM' (2018) as in DualFL's experiments, every node with a step, a momentum and restarts
    of its own. An iteration takes one gradient and a little more than two values.
    """

    def advance(self, problem: LocalProblem, state: Moving, active: Tensor, rule: StoppingRule) -> Progress:
        y, energy, x, t, step = state
        gradient = problem.grad(x, active)
        small = rule.small_gradient(gradient)
        moving = active & ~small
        energy_x = problem.value(x, moving)
        square = gradient.square().sum(-1, keepdim=True)
        descent = backtrack(
            moving,
            x,
            energy_x,
            grown(step, gradient, energy_x),
            candidate=lambda step: x - step * gradient,
            bound=lambda point, step: energy_x - step / 2 * square,
            energy_of=problem.value,
        )
        y_new, t_new = descent.point, next_t(t, step, descent.step)
        momentum = (t - 1) / t_new * (y_new - y) + t / t_new * (y_new - x)
        uphill = (gradient * (y_new - y)).sum(-1, keepdim=True) > 0
        after = Moving(
            answer=choose(small, x, y_new),
            energy=descent.energy,
            x=choose(uphill, y_new, y_new + momentum),
            t=choose(uphill, torch.ones_like(t), t_new),
            step=descent.step,
        )
        done = small | (descent.found & rule.small_change(descent.energy, energy))
        return Progress(after, done, ~descent.found)
