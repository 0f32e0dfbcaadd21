"""Local solvers: they find the minimiser, each node by itself, at the cost expected, and say if not."""

from __future__ import annotations

import pytest
import torch
from local_problems import EXACTLY, LINEAR, Recorded, ill_conditioned, logistic, oracle_of, solve
from torch import Tensor

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.problem.losses import Hinge
from holdfast.problem.problem import FunctionProblem
from holdfast.solvers import (
    AOGM,
    FISTA,
    LBFGS,
    GradientDescent,
    Newton,
    StochasticGradientDescent,
)
from holdfast.solvers.fista import least_subgradient

# --- the cost of a solve -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_aogm_takes_the_iterations_that_were_measured_before():
    problem = Recorded(ill_conditioned(1e1, 1e3, 1e5))
    _, work = solve(problem, AOGM(), LINEAR)
    assert work.unfinished_solves == 0
    for iterations, expected in zip(problem.count("grad"), (31, 359, 2173), strict=True):
        assert iterations == pytest.approx(expected, rel=0.2)


@pytest.mark.slow
def test_gradient_descent_takes_the_iterations_that_were_measured_before():
    for kappa, expected in ((1e1, 100), (1e3, 9305)):
        work = solve(ill_conditioned(kappa), GradientDescent(lr=1.0), LINEAR)[1]
        assert work.gradient_evaluations == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize(
    "solver", [AOGM(), FISTA(), LBFGS(), GradientDescent(lr=1.0)], ids=lambda s: type(s).__name__
)
def test_a_node_that_is_done_costs_nothing_more(solver):
    alone = Recorded(ill_conditioned(10))
    solve(alone, solver, LINEAR)
    together = Recorded(ill_conditioned(10, 100))
    _, work = solve(together, solver, LINEAR)
    for kind in ("grad", "value"):
        assert together.count(kind)[0] == alone.count(kind)[0] < together.count(kind)[1]
    assert work.gradient_evaluations == sum(together.count("grad"))
    assert work.value_evaluations == sum(together.count("value"))


def log_sum_exp(x: Tensor) -> Tensor:
    """Curvature between nearly 0 and 25, depending on the place."""
    return torch.logsumexp(torch.stack([*(5 * x), *(-5 * x)]), 0) + 0.01 * x.square().sum()


def parabolas(x: Tensor) -> Tensor:
    """Its least value is 0, to which no change is small."""
    return (torch.tensor([1.0, 30, 900]) * x**2).sum()


@pytest.mark.parametrize("start", [3.0, 0.1])
@pytest.mark.parametrize("function", [log_sum_exp, parabolas])
def test_backtracking_accepts_no_step_that_breaks_the_descent_condition(function, start):
    x0 = torch.tensor([1.0, 0.3, -2.0], dtype=torch.float64)
    problem = Recorded(FunctionProblem([function], x0))
    _, work = solve(problem, AOGM(), start=start * x0)
    assert work.unfinished_solves == 0
    calls, iterations, halvings = problem.calls[1:], 0, 0  # the first is the value at the start
    while calls:
        # One iteration: the gradient and the value at x, then the values at points x - step * gradient.
        (_, x, _, gradient), (_, same, _, energy), *rest = calls
        assert torch.equal(x, same)
        trials = []
        while rest and rest[0][0] == "value":
            trials.append(rest.pop(0))
        for index, (_, point, _, value) in enumerate(trials):
            step = (point - x).norm() / gradient.norm()
            excess = value - (energy - step / 2 * gradient.square().sum())
            if index == len(trials) - 1:
                assert excess <= 1.1e-15 * energy.abs()  # rounding is forgiven
            else:
                assert excess > 0
        iterations, halvings, calls = iterations + 1, halvings + len(trials) - 1, rest
    assert iterations > 10
    assert halvings > 0


# --- the answer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "solver",
    [AOGM(**EXACTLY), FISTA(**EXACTLY), LBFGS(**EXACTLY), GradientDescent(lr=0.15, **EXACTLY)],
    ids=lambda s: type(s).__name__,
)
def test_solvers_agree_with_newton_on_quadratics(quadratics, solver):
    """The Hessians' eigenvalues are at least .5 + .7, so the answer is within 1e-10/1.2 of the minimiser."""
    given = {"linear": quadratics.b.flip(0), "weight": 0.7, "start": 1.0}
    exact, _ = solve(quadratics, Newton(), **given)
    answer, work = solve(quadratics, solver, **given)
    assert (answer - exact).norm(dim=-1).max() < 1e-10
    assert work.unfinished_solves == 0


@pytest.mark.parametrize(
    "solver",
    [AOGM(**EXACTLY), FISTA(**EXACTLY), LBFGS(**EXACTLY)],
    ids=lambda s: type(s).__name__,
)
def test_solvers_agree_with_newton_on_logistic_regression(solver):
    problem = logistic()
    linear = 0.1 * torch.randn(
        4, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    exact, _ = solve(problem, Newton(), linear)
    answer, work = solve(problem, solver, linear)
    assert (answer - exact).norm(dim=-1).max() < 1e-10 / 0.1 + 1e-12
    assert work.unfinished_solves == 0


@pytest.mark.parametrize(
    "solver", [AOGM(), FISTA(), LBFGS(), GradientDescent(lr=0.2)], ids=lambda s: type(s).__name__
)
def test_rows_do_not_influence_each_other(quadratics, solver):
    linear = quadratics.b.flip(0)
    together, _ = solve(quadratics, solver, linear)
    for node in range(quadratics.nodes):
        alone, _ = solve(quadratics, solver, linear[[node]], nodes=[node])
        assert (alone - together[node]).abs().max() < 1e-13


def test_sgd_takes_gradient_steps_on_minibatches(quadratics):
    """With exact gradients it is gradient descent without tolerance, (I - lr A)^k from the minimiser away."""
    answer, work = solve(quadratics, StochasticGradientDescent(lr=0.1, steps=7), start=1.0)
    same, _ = solve(quadratics, GradientDescent(lr=0.1, max_steps=7, tolerance=None), start=1.0)
    power = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) - 0.1 * quadratics.A, 7)
    expected = quadratics.b + (power @ (1 - quadratics.b)[..., None]).squeeze(-1)
    assert (answer - expected).abs().max() < 1e-13
    assert (same - expected).abs().max() < 1e-13
    assert (work.gradient_evaluations, work.unfinished_solves) == (70, 0)
    problem = logistic(batch_size=5)
    oracle = oracle_of(problem)
    zero = torch.zeros(4, problem.dim, dtype=torch.float64)
    oracle.argmin(zero, zero, 0.0, zero, solver=StochasticGradientDescent(lr=0.1, steps=3))
    assert oracle.work.sample_gradients == 4 * 5 * 3


# --- l1 and hinge ------------------------------------------------------------------------------------------


def test_fista_solves_a_separable_l1_problem_by_hand():
    """argmin (u - b)^2 a/2 + .5 |u| = b pulled towards zero by .5/a, and zero if it is nearer than that."""
    a, b = torch.tensor([1.0, 2, 4, 1]).double(), torch.tensor([3.0, -1, 0.1, -0.4]).double()
    problem = FunctionProblem([lambda x: (a * (x - b) ** 2).sum() / 2], torch.zeros(4).double(), l1=0.5)
    answer, _ = solve(problem, FISTA(**EXACTLY), start=1.0)
    assert torch.allclose(answer[0], torch.tensor([2.5, -0.75, 0, 0]).double(), atol=1e-10)
    assert (answer[0, 2:] == 0).all()


def test_fista_meets_the_optimality_condition_of_l1_regression():
    problem = logistic(l1=0.02)
    linear = torch.full((4, problem.dim), 0.003, dtype=torch.float64)
    answer, work = solve(problem, FISTA(**EXACTLY), linear)
    smooth = logistic().full_grads(answer, torch.arange(4)) + linear
    assert work.unfinished_solves == 0
    assert least_subgradient(smooth, answer, 0.02).norm(dim=-1).max() < 1.1e-10
    assert smooth[answer == 0].abs().max() <= 0.02
    assert 0.2 < (answer == 0).double().mean() < 0.9


@pytest.mark.parametrize("solver", [AOGM(), LBFGS(), Newton()], ids=lambda s: type(s).__name__)
def test_smooth_solvers_refuse_kinks(solver):
    with pytest.raises(HoldfastError, match=r"needs a smooth objective, and this one has l1 = 0\.02"):
        solve(logistic(l1=0.02), solver)
    with pytest.raises(HoldfastError, match="needs a smooth loss, and the exact hinge has kinks"):
        solve(logistic(Hinge()), solver)


def test_a_smoothed_hinge_is_within_reach_of_gradient_methods():
    problem = logistic(Hinge(smoothing=0.1))
    first, _ = solve(problem, AOGM(**EXACTLY))
    second, work = solve(problem, LBFGS(**EXACTLY))
    assert work.unfinished_solves == 0
    assert (first - second).norm(dim=-1).max() < 2e-10 / 0.1
    exact = logistic(Hinge())
    lower = exact.values(first, torch.arange(4)) - problem.values(first, torch.arange(4))
    assert (lower > 0).all()
    assert (lower <= 0.1 / 2).all()


def test_newton_names_a_singular_hessian():
    data = [(torch.zeros(4, 2), torch.arange(4) % 2)] * 2
    with pytest.raises(HoldfastError, match=r"'newton' met a singular Hessian: .*; add l2"):
        hf.train(hf.DualFL(nu=0.1, rho=0.5), model=torch.nn.Linear(2, 2), data=data, rounds=1)
