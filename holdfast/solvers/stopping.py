"""When a local solve is good enough: the rules that solvers test, and what DualFL's theory asks for.

R1, ``stop = "energy"``: the relative change of the local objective in a step is small. It is the rule of the
paper's experiments, but it proves nothing: on ill-conditioned problems it fires early. R2 and R3 bound the
norm of the gradient instead, such that the local duality gap Gamma_j stays below a sequence that the theorems
allow: ``gradient_norm_for_gap(allowed_gap(...), ...)``, to be handed to ``oracle.argmin``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from holdfast.contract.solver import LocalProblem
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, NonNegative, Positive, Whole, check

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
    with its own primal point u - grad E(u)/nu. At u itself, which DualFL goes on with, that is a good guess
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
