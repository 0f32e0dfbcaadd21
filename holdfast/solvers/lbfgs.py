"""L-BFGS on every node at once, each with a memory and a line search of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from holdfast.contract.solver import SOLVERS, LocalProblem
from holdfast.core.validation import Count
from holdfast.solvers.iterative import IterativeSolver, Progress, StoppingRule, backtrack, choose

ARMIJO = 1e-4  # share of the slope's promise that a step must keep


class _State(NamedTuple):
    answer: Tensor
    energy: Tensor  # [m, 1]
    gradient: Tensor  # [m, d]
    moves: Tensor  # [m, memory, d]: last steps, newest last
    changes: Tensor  # [m, memory, d]: what they changed in the gradient
    weights: Tensor  # [m, memory, 1]: 1/<move, change>; 0 where there is none yet


@SOLVERS.register("lbfgs")
@dataclass(frozen=True, kw_only=True)
class LBFGS(IterativeSolver):
    """L-BFGS with backtracking: smooth problems, few iterations, one gradient and about one value in each."""

    memory: Count = 10

    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> _State:
        none = start.new_zeros(len(start), self.memory, start.shape[-1])
        return _State(start, problem.value(start), problem.grad(start), none, none, none[..., :1])

    def advance(self, problem: LocalProblem, state: _State, active: Tensor, rule: StoppingRule) -> Progress:
        u, energy, gradient = state.answer, state.energy, state.gradient
        small = rule.small_gradient(gradient)
        moving = active & ~small
        direction = -_times_inverse_hessian(state, gradient)
        slope = (gradient * direction).sum(-1, keepdim=True)
        descent = backtrack(
            moving,
            u,
            energy,
            torch.ones_like(energy),
            candidate=lambda step: u + step * direction,
            bound=lambda point, step: energy + ARMIJO * step * slope,
            energy_of=problem.value,
        )
        there = problem.grad(descent.point, descent.found)
        move, change = descent.point - u, there - gradient
        product = (move * change).sum(-1, keepdim=True)
        # Only pairs with clearly positive curvature keep the inverse Hessian positive definite.
        useful = product > torch.finfo(u.dtype).eps * change.square().sum(-1, keepdim=True)
        after = _State(
            answer=choose(small, u, descent.point),
            energy=descent.energy,
            gradient=there,
            moves=choose(useful, _append(state.moves, move), state.moves),
            changes=choose(useful, _append(state.changes, change), state.changes),
            weights=choose(useful, _append(state.weights, 1 / product), state.weights),
        )
        done = small | (descent.found & rule.small_change(descent.energy, energy))
        return Progress(after, done, ~descent.found)


def _times_inverse_hessian(state: _State, gradient: Tensor) -> Tensor:
    """The two-loop recursion (Nocedal 1980), row by row."""
    q, shares = gradient, []
    for i in reversed(range(state.moves.shape[1])):
        share = state.weights[:, i] * (state.moves[:, i] * q).sum(-1, keepdim=True)
        shares.append(share)
        q = q - share * state.changes[:, i]
    newest = state.changes[:, -1].square().sum(-1, keepdim=True) * state.weights[:, -1]
    # Before the first pair: a step of length one at most.
    scale = torch.where(newest > 0, newest, gradient.norm(dim=-1, keepdim=True).clamp(min=1))
    q = q / scale
    for i, share in enumerate(reversed(shares)):
        again = state.weights[:, i] * (state.changes[:, i] * q).sum(-1, keepdim=True)
        q = q + (share - again) * state.moves[:, i]
    return q


def _append(past: Tensor, newest: Tensor) -> Tensor:
    return torch.cat([past[:, 1:], newest.unsqueeze(1)], 1)
