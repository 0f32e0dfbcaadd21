"""The loop that solvers by gradient steps share: rows advance together, and each stops by itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from holdfast.contract.solver import LocalProblem, Solver, require_smooth
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map
from holdfast.core.validation import Count, NonNegative, Positive, Whole, check

# --- when a local solve is good enough ------------------------------------------------------------------
#
# R1, ``stop = "energy"``: the relative change of the local objective in a step is small. It is the rule of
# the paper's experiments, but it proves nothing: on ill-conditioned problems it fires early. R2 and R3 bound
# the norm of the gradient instead, such that the local duality gap Gamma_j stays below a sequence that the
# theorems allow: ``gradient_norm_for_gap(allowed_gap(...), ...)``, to be handed to ``oracle.argmin``.


GapRule = Literal["strong-convexity", "dual-point"]


@dataclass(frozen=True)
class StoppingRule:
    """What ends the solve of a row; without either bound, only the number of steps does."""

    energy_change: float | None = None  # relative, in one step
    gradient_norm: float | None = None
    least_energy: Tensor | None = None  # [m, 1]: below it energies count as zero, lest they shrink for ever

    @property
    def exists(self) -> bool:
        return self.energy_change is not None or self.gradient_norm is not None

    def starting_at(self, energy: Tensor) -> StoppingRule:
        """This rule for rows that begin with ``energy`` [m, 1]."""
        return replace(self, least_energy=torch.finfo(energy.dtype).eps * energy.abs())

    def small_change(self, now: Tensor, before: Tensor) -> Tensor:
        """R1 for energies [m, 1]: |now - before| <= tolerance max(|now|, least energy)."""
        if self.energy_change is None:
            return torch.zeros_like(now, dtype=torch.bool)
        return (now - before).abs() <= self.energy_change * now.abs().clamp(min=self.least_energy)

    def small_gradient(self, gradient: Tensor) -> Tensor:
        """[m, 1]: whether the gradient [m, d] (or the least subgradient) of a row is small enough."""
        norm: Tensor = gradient.norm(dim=-1, keepdim=True)
        if self.gradient_norm is None:
            return torch.zeros_like(norm, dtype=torch.bool)
        return norm <= self.gradient_norm


def check_precision(solver: str, rule: StoppingRule, problem: LocalProblem, start: Tensor) -> None:
    """Refuses a tolerance that rounding in the problem's own number type will not let the solver reach."""
    name, eps = str(start.dtype).removeprefix("torch."), torch.finfo(start.dtype).eps
    if rule.energy_change is not None and rule.energy_change < eps:
        raise HoldfastError(
            f"the solver {solver!r} cannot reach a tolerance of {rule.energy_change:g} in {name}, which "
            f"resolves changes of {eps:.1e}: {_advice(start, f'a tolerance of {10 * eps:.0e} or more')}"
        )
    # In float64 there is nothing better to turn to: a row that rounding stops is reported as unfinished.
    if rule.gradient_norm is not None and start.dtype != torch.float64:
        own = problem.grad(start) - problem.slope(start)
        possible = eps * float(own.norm(dim=-1).max())
        if rule.gradient_norm < possible:
            raise HoldfastError(
                f"the solver {solver!r} cannot reach a gradient norm of {rule.gradient_norm:.1e} in {name}, "
                f"where rounding leaves about {possible:.1e}: {_advice(start, 'ask for less')}"
            )


def _advice(start: Tensor, less: str) -> str:
    return f"use {less}" if start.dtype == torch.float64 else f"use float64, or {less}"


def allowed_gap(round: int, nodes: int, *, nu: float, rho: float, gamma: float) -> float:
    """The duality gap that DualFL's theorems allow a local solve in ``round`` = 0, 1, ...

    (3.7), for rho = 0: 1/(N nu (n+1)^(4+gamma)); (3.8), for rho > 0: (1/N) ((1 - sqrt(rho))/(1 + gamma))^n. A
    larger ``gamma`` > 0 asks for more accuracy and gives a smaller constant in the rate.
    """
    check("round", Whole, round)
    check("nodes", Count, nodes)
    check("nu", Positive, nu)
    check("gamma", Positive, gamma)
    if not 0 <= rho < 1:
        raise HoldfastError(f"rho: should be at least 0 and less than 1, got {rho}")
    if rho == 0:
        return 1 / (nodes * nu * math.pow(round + 1, 4 + gamma))
    return math.pow((1 - math.sqrt(rho)) / (1 + gamma), round) / nodes


def gradient_norm_for_gap(gap: float, rule: GapRule, *, mu: float, nu: float) -> float:
    """The norm of the gradient of E(u) = f_j(u) - nu <zeta_j, u> that keeps the duality gap within ``gap``.

    ``"strong-convexity"`` (R2) rests on Gamma_j(u) <= ||grad E(u)||^2 / (2 (mu - nu)), so it needs nu < mu.
    ``"dual-point"`` (R3) works for any nu: ||grad E(u)||^2 / (2 nu) is the gap of the dual point grad g_j(u)
    with its own primal point u - grad E(u)/nu. At u itself, with which DualFL continues, that is a good guess
    and no proof: for nu = mu the gap at an inexact u is in general infinite, whatever the solver does.
    """
    check("gap", Positive, gap)
    check("mu", NonNegative, mu)
    check("nu", Positive, nu)
    check("rule", GapRule, rule)
    if rule == "dual-point":
        return math.sqrt(2 * nu * gap)
    if nu >= mu:
        raise HoldfastError(
            f"the rule 'strong-convexity' needs nu < mu, got nu = {nu:g} and mu = {mu:g}: take a smaller nu, "
            f"such as {0.9 * mu:g}, or the rule 'dual-point'"
        )
    return math.sqrt(2 * (mu - nu) * gap)


# --- the loop that solvers by gradient steps share ------------------------------------------------------


class Progress(NamedTuple):
    """A step of all rows."""

    state: Any  # a NamedTuple of [m, ...] tensors with ``answer`` [m, d] and ``energy`` [m, 1] among them
    done: Tensor  # [m, 1]: the stopping rule is met
    stuck: Tensor  # [m, 1]: no further step is possible


@dataclass(frozen=True, kw_only=True)
class IterativeSolver(Solver):
    """Steps until a rule is met; rows that are done stand still and cost nothing."""

    handles_l1: ClassVar[bool] = False
    needs_smoothness: ClassVar[bool] = True

    stop: Literal["energy", "gradient"] = "energy"  # relative change in a step, or norm of the gradient
    tolerance: Positive | None = 1e-12  # for what ``stop`` says; None: take exactly max_steps steps
    max_steps: Count = 10_000

    @abstractmethod
    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> Any:
        """The state before the first step."""

    @abstractmethod
    def advance(self, problem: LocalProblem, state: Any, active: Tensor, rule: StoppingRule) -> Progress:
        """One step; only the ``active`` rows [m, 1] count, and only they may cost evaluations."""

    def solve(self, problem: LocalProblem, start: Tensor) -> Tensor:
        rule = self._rule(problem)
        if self.needs_smoothness or rule.exists:
            require_smooth(type(self).__name__, problem, l1=self.handles_l1)
        check_precision(type(self).__name__, rule, problem, start)
        state = self.begin(problem, start, rule)
        rule = rule.starting_at(state.energy)
        active = torch.ones_like(start[..., :1], dtype=torch.bool)
        unfinished = torch.zeros_like(active)
        for _ in range(self.max_steps):
            after, done, stuck = self.advance(problem, state, active, rule)
            if bool(active.all()):
                state = after
            else:
                state = tree_map(lambda new, old, rows=active: choose(rows, new, old), after, state)
            unfinished = unfinished | (active & stuck & ~done)
            active = active & ~done & ~stuck
            if not bool(active.any()):
                break
        problem.report_unfinished(unfinished | active if rule.exists else unfinished)
        answer: Tensor = state.answer
        return answer

    @property
    def adaptive(self) -> bool:
        return self.tolerance is not None

    def _rule(self, problem: LocalProblem) -> StoppingRule:
        if problem.gradient_norm is not None:
            return StoppingRule(gradient_norm=problem.gradient_norm)
        if self.stop == "energy":
            return StoppingRule(energy_change=self.tolerance)
        return StoppingRule(gradient_norm=self.tolerance)


def choose(rows: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """``new`` where ``rows`` [m, 1] says so, else ``old``; tensors [m, ...]."""
    return torch.where(rows.reshape(len(rows), *[1] * (new.dim() - 1)), new, old)


# --- what AOGM and FISTA share --------------------------------------------------------------------------


class Moving(NamedTuple):
    answer: Tensor  # y: the end of the last step
    energy: Tensor  # [m, 1]: there
    x: Tensor  # extrapolated from there: where the next gradient is taken
    t: Tensor  # [m, 1]: what the momentum is made of
    step: Tensor  # [m, 1]


@dataclass(frozen=True, kw_only=True)
class Accelerated(IterativeSolver):
    """Steps found by backtracking; the first search begins at ``first_step``."""

    first_step: Positive = 1.0

    def begin(self, problem: LocalProblem, start: Tensor, rule: StoppingRule) -> Moving:
        one = start.new_ones(len(start), 1)
        return Moving(start, problem.value(start), start, one, self.first_step * one)


def next_t(t: Tensor, step: Tensor, new_step: Tensor) -> Tensor:
    """t_{k+1}, such that the method stays accelerated though its step changes."""
    return (1 + torch.sqrt(1 + 4 * step / new_step * t**2)) / 2


# --- backtracking line search on every node at once, each with a step of its own ------------------------


GROWTH = 1 / 0.9  # "full" backtracking: a step may grow again in every iteration
HALVINGS = 100  # after which a search gives up


class Descent(NamedTuple):
    """The outcome of a search, row by row."""

    point: Tensor  # [m, d]
    energy: Tensor  # [m, 1]: at ``point``
    step: Tensor  # [m, 1]
    found: Tensor  # [m, 1]: whether a step was accepted; if not, ``point`` is where the search began


def backtrack(
    rows: Tensor,
    x: Tensor,
    energy: Tensor,
    step: Tensor,
    candidate: Callable[[Tensor], Tensor],
    bound: Callable[[Tensor, Tensor], Tensor],
    energy_of: Callable[[Tensor, Tensor], Tensor],
) -> Descent:
    """Halves the ``step`` [m, 1] of each of the ``rows`` [m, 1] until its descent condition holds.

    ``candidate(step)`` is the point [m, d] that a step leads to, ``bound(point, step)`` [m, 1] what the
    energy may be there, up to rounding, and ``energy_of(point, rows)`` computes it for these rows alone.
    """
    slack = rounding(energy)
    reached, level, seeking = x, energy, rows
    for _ in range(HALVINGS):
        point = candidate(step)
        value = energy_of(point, seeking)
        fine = seeking & (value <= bound(point, step) + slack)
        reached, level = choose(fine, point, reached), choose(fine, value, level)
        seeking = seeking & ~fine
        if not bool(seeking.any()):
            break
        step = choose(seeking, step / 2, step)
    return Descent(reached, level, step, rows & ~seeking)


def grown(step: Tensor, gradient: Tensor, energy: Tensor) -> Tensor:
    """The step to try first, [m, 1]: longer than the last one, unless rounding hides what it gains.

    There the descent condition holds whatever the step, and would let it grow without bounds.
    """
    gain = step * gradient.square().sum(-1, keepdim=True)
    return choose(gain > rounding(energy), step * GROWTH, step)


def rounding(energy: Tensor) -> Tensor:
    """How far computed energies may be from the true ones: 1e-15 times their size in float64."""
    return 4.5 * torch.finfo(energy.dtype).eps * energy.abs()
