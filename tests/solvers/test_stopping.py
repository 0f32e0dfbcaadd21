"""When local solvers stop: limits, precision, and the accuracies that theory asks for."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import make_quadratics
from local_problems import EXACTLY, LINEAR, Recorded, ill_conditioned, logistic, solve

from holdfast.core.errors import HoldfastError
from holdfast.solvers import (
    AOGM,
    SOLVERS,
    GradientDescent,
    Newton,
    StochasticGradientDescent,
    allowed_gap,
    gradient_norm_for_gap,
)


def test_a_limit_is_reported_for_each_node_that_hits_it():
    """Of condition numbers 10 and 1000 (with 29 and 362 iterations) the second is not done in 100."""
    problem = ill_conditioned(10, 1000)
    assert solve(problem, AOGM(max_steps=100), LINEAR)[1].unfinished_solves == 1
    assert solve(problem, AOGM(max_steps=10), LINEAR)[1].unfinished_solves == 2
    assert solve(problem, AOGM(max_steps=10, tolerance=None), LINEAR)[1].unfinished_solves == 0


def test_steps_too_long_end_at_once_and_are_reported():
    objective = Recorded(ill_conditioned(10))
    _, work = solve(objective, GradientDescent(lr=1e9), LINEAR)
    assert work.unfinished_solves == 1
    assert work.gradient_evaluations < 100


def test_float32_refuses_what_it_cannot_reach():
    objective = logistic(dtype=torch.float32)
    with pytest.raises(HoldfastError, match=r"tolerance of 1e-12 in float32, .* use float64, or .* 1e-06"):
        solve(objective, AOGM())
    with pytest.raises(HoldfastError, match=r"gradient norm of 1.0e-10 in float32, .*leaves about .*e-0[78]"):
        solve(objective, AOGM(**EXACTLY))
    with pytest.raises(HoldfastError, match="use float64"):
        solve(objective, AOGM(), gradient_norm=1e-12)
    coarse, work = solve(objective, AOGM(tolerance=1e-6))
    exact, _ = solve(logistic(), Newton())
    assert work.unfinished_solves == 0
    assert (coarse - exact).norm() < 0.01 * exact.norm()


def test_theory_may_ask_for_an_accuracy(quadratics):
    """R2: for nu < mu the duality gap, grad^T (A - nu I)^-1 grad / 2 for quadratics, is small enough."""
    mu, nu, linear = 0.5, 0.4, quadratics.b.flip(0)
    gap = allowed_gap(6, quadratics.nodes, nu=nu, rho=0.05, gamma=0.1)
    assert gap == pytest.approx(((1 - math.sqrt(0.05)) / 1.1) ** 6 / 10, rel=1e-14)
    norm = gradient_norm_for_gap(gap, "strong-convexity", mu=mu, nu=nu)
    answer, work = solve(quadratics, AOGM(), linear, gradient_norm=norm)
    gradient = quadratics.grads(answer) + linear
    shifted = quadratics.A - nu * torch.eye(4, dtype=torch.float64)
    gaps = (gradient * torch.linalg.solve(shifted, gradient)).sum(-1) / 2
    assert work.unfinished_solves == 0
    assert 0 < gaps.max() <= gap
    longer, _ = solve(quadratics, AOGM(), linear, gradient_norm=norm / 100)
    assert (quadratics.grads(longer) + linear).norm(dim=-1).max() <= norm / 100


def test_tolerances_of_the_theory_by_hand():
    assert allowed_gap(1, 8, nu=0.5, rho=0.0, gamma=1.0) == 1 / (8 * 0.5 * 32)
    assert allowed_gap(0, 8, nu=0.5, rho=0.25, gamma=1.0) == 1 / 8
    assert allowed_gap(2, 8, nu=0.5, rho=0.25, gamma=1.0) == pytest.approx(0.25**2 / 8)
    assert gradient_norm_for_gap(2.0, "strong-convexity", mu=1.25, nu=0.25) == 2.0
    assert gradient_norm_for_gap(2.0, "dual-point", mu=0.25, nu=0.25) == 1.0


def test_rules_that_cannot_hold_say_so(quadratics):
    with pytest.raises(HoldfastError, match=r"needs nu < mu, got nu = 0.01 and mu = 0.01: .* such as 0.009"):
        gradient_norm_for_gap(1e-3, "strong-convexity", mu=0.01, nu=0.01)
    with pytest.raises(HoldfastError, match="rho: should be at least 0 and less than 1, got 1"):
        allowed_gap(0, 8, nu=0.1, rho=1.0, gamma=1.0)
    with pytest.raises(HoldfastError, match="'sgd' cannot promise an accuracy"):
        solve(quadratics, StochasticGradientDescent(lr=0.1, steps=3), gradient_norm=1e-3)


def test_solvers_are_chosen_by_name_with_checked_options():
    assert set(SOLVERS) == {"aogm", "fista", "gd", "lbfgs", "newton", "sgd"}
    assert SOLVERS.build("aogm", {"tolerance": 1e-8}) == AOGM(tolerance=1e-8)
    with pytest.raises(HoldfastError, match="tolerance: should be greater than 0, got -1"):
        AOGM(tolerance=-1.0)
    with pytest.raises(HoldfastError, match="the value 'lr' is missing"):
        SOLVERS.build("gd", {})
    with pytest.raises(HoldfastError, match="did you mean 'max_steps'"):
        SOLVERS.build("lbfgs", {"maxsteps": 3})


def test_quadratics_of_the_fixture_have_the_curvatures_used_here():
    eigenvalues = torch.linalg.eigvalsh(make_quadratics().A)
    assert eigenvalues.min() == pytest.approx(0.5)
    assert eigenvalues.max() == pytest.approx(5.0)
