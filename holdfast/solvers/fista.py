"""FISTA: accelerated proximal gradient steps, for objectives with an l1 term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


@SOLVERS.register("fista")
@dataclass(frozen=True, kw_only=True)
class FISTA(Accelerated):
    """Accelerated proximal gradient with adaptive restart and full backtracking; treats an l1 term exactly.

    Beck and Teboulle (2009), restarts by O'Donoghue and Candes (2015). Kinks of the loss itself (the exact
    hinge) are not treated: smooth them, see the loss 'hinge'.
    """

    handles_l1: ClassVar[bool] = True

    def advance(self, problem: LocalProblem, state: Moving, active: Tensor, rule: StoppingRule) -> Progress:
        y, energy, x, t, step = state
        l1 = problem.l1
        gradient = problem.grad(x, active) - l1 * x.sign()  # of the smooth part
        shortest = least_subgradient(gradient, x, l1)
        small = rule.small_gradient(shortest)
        moving = active & ~small

        def smooth_energy(point: Tensor, rows: Tensor) -> Tensor:
            return problem.value(point, rows) - l1 * _norm1(point)

        energy_x = smooth_energy(x, moving)

        def bound(point: Tensor, step: Tensor) -> Tensor:
            away = point - x
            return energy_x + (gradient * away + away.square() / (2 * step)).sum(-1, keepdim=True)

        descent = backtrack(
            moving,
            x,
            energy_x,
            grown(step, shortest, energy_x),
            candidate=lambda step: soft_threshold(x - step * gradient, step * l1),
            bound=bound,
            energy_of=smooth_energy,
        )
        y_new, t_new = descent.point, next_t(t, step, descent.step)
        energy_new = descent.energy + l1 * _norm1(y_new)
        uphill = ((x - y_new) * (y_new - y)).sum(-1, keepdim=True) > 0
        after = Moving(
            answer=choose(small, x, y_new),
            energy=energy_new,
            x=choose(uphill, y_new, y_new + (t - 1) / t_new * (y_new - y)),
            t=choose(uphill, torch.ones_like(t), t_new),
            step=descent.step,
        )
        done = small | (descent.found & rule.small_change(energy_new, energy))
        return Progress(after, done, ~descent.found)


def soft_threshold(u: Tensor, width: Tensor | float) -> Tensor:
    """argmin_v ||v - u||^2 / 2 + width ||v||_1"""
    return u.sign() * (u.abs() - width).clamp(min=0)


def least_subgradient(gradient: Tensor, u: Tensor, l1: float) -> Tensor:
    """The shortest subgradient at ``u`` of l1 ||u||_1 plus a function that has ``gradient`` there."""
    return torch.where(u == 0, soft_threshold(gradient, l1), gradient + l1 * u.sign())


def _norm1(u: Tensor) -> Tensor:
    return u.abs().sum(-1, keepdim=True)
