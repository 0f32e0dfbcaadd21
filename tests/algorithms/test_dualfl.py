"""DualFL: its dual is FISTA's, its rates are the theorems', in all three regimes."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics, make_quadratics
from dual_problems import SoftThreshold, ill_conditioned, merely_convex, power, rounds_to, soft_threshold
from linear_rounds import MU, L, measured_decay, reference_quadratics
from server_runs import stochastic_digits

import holdfast as hf
from holdfast.algorithms import FedAvg
from holdfast.algorithms.dualfl import DualFL, momentum
from holdfast.api import as_network
from holdfast.engines.common.simulation import Simulation
from holdfast.solvers import AOGM, StochasticGradientDescent
from holdfast_papers.dualfl.quadratics import NewtonStep


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


def simulate(algorithm: DualFL, problem) -> Simulation:
    return Simulation(algorithm, problem, as_network(None, problem.nodes))


def fista_on_the_dual(problem: Quadratics, nu: float, rho: float, steps: int):
    """Algorithm 2 of the paper: (xi, eta) [n, d] after each step on the dual of (6.4), by its own formulas.

    g_j = f_j - (nu/2)||.||^2 has the Hessian B_j = A_j - nu I, so that
    prox of nu g_j^* at v solves (B_j^-1 + I/nu) xi = v/nu - B_j^-1 A_j b_j.
    """
    n, d = problem.b.shape
    inverse = torch.linalg.inv(problem.A - nu * torch.eye(d, dtype=torch.float64))
    constant = (inverse @ problem.A @ problem.b[..., None]).squeeze(-1)
    system = inverse + torch.eye(d, dtype=torch.float64) / nu
    xi = eta = torch.zeros(n, d, dtype=torch.float64)
    t = 1.0
    for _ in range(steps):
        gradient = eta.sum(0) / (n * nu)
        new = torch.linalg.solve(system, (eta - nu * gradient) / nu - constant)
        t_new = (1 - rho * t**2 + math.sqrt((1 - rho * t**2) ** 2 + 4 * t**2)) / 2
        beta = (t - 1) / t_new * (1 - t_new * rho) / (1 - rho)
        xi, eta, t = new, (1 + beta) * new - beta * xi, t_new
        yield xi, eta


@pytest.mark.parametrize(("nu", "rho"), [(0.4, 0.0), (0.4, 0.08), (0.1, 0.02)])
def test_the_dual_sequence_is_that_of_fista(quadratics, nu, rho):
    """Lemma 6.5: xi_j = nu (zeta_j - theta_j), nu zeta_j = eta_j - mean eta, theta = -sum xi / (N nu)."""
    simulation = simulate(DualFL(nu=nu, rho=rho), quadratics)
    for xi, eta in fista_on_the_dual(quadratics, nu, rho, 60):
        dual_before = simulation.state.dual
        simulation.step()
        s = simulation.state
        assert (dual_before - nu * s.x - xi).abs().max() <= 1e-10
        assert (s.dual - (eta - eta.mean(0))).abs().max() <= 1e-10
        assert (s.mean + xi.mean(0) / nu).abs().max() <= 1e-10
    assert s.dual.abs().max() > 1


def test_without_momentum_it_is_local_gecl_with_exact_local_solves(quadratics):
    """Alg. 2 of Local G-ECL, where K lr = 1/nu and the K steps are replaced by the minimiser."""
    nu = 0.3
    simulation = simulate(DualFL(nu=nu), quadratics)
    dual = torch.zeros_like(quadratics.b)
    for _ in range(60):
        x = quadratics.b + torch.linalg.solve(quadratics.A, dual)  # grad f_i(x) = dual
        dual = dual + nu * (x.mean(0) - x)
        simulation.state = simulation.state._replace(t=torch.ones_like(simulation.state.t))
        simulation.step()
        assert (simulation.models - x.mean(0)).abs().max() <= 1e-10
        assert (simulation.state.dual - dual).abs().max() <= 1e-10


@pytest.mark.parametrize("nu", [0.01, 0.5])
def test_equal_hessians_need_one_round(nu):
    unlike = make_quadratics(dim=6)
    alike = Quadratics(unlike.A[:1].expand_as(unlike.A), unlike.b)
    path = alike.run(DualFL(nu=nu), 5)
    assert (path[0] - alike.optimum).norm(dim=-1).min() > 0.1
    assert (path[1:] - alike.optimum).norm(dim=-1).max() < 1e-13


@pytest.mark.parametrize("problem", ["exact", "stochastic"])
def test_duals_sum_to_zero(quadratics, problem):
    """Whatever the local solver does."""
    if problem == "exact":
        simulation = simulate(DualFL(nu=MU, rho=MU / L), quadratics)
    else:
        simulation = simulate(
            DualFL(nu=0.1, rho=0.05, solver=StochasticGradientDescent(lr=0.1, steps=3)), stochastic_digits()
        )
    for _ in range(20):
        simulation.step()
        dual = simulation.state.dual
        assert dual.sum(0).abs().max() <= 1e-12 * dual.abs().max() * len(dual)
    assert dual.abs().max() > 1e-3


def test_the_optimum_is_a_fixed_point(quadratics):
    simulation = simulate(DualFL(nu=MU, rho=MU / L), quadratics)
    star = quadratics.optimum.expand(10, -1)
    dual = quadratics.grads(star)
    simulation.state = simulation.state._replace(
        x=star, mean=star, dual=dual, plain_dual=dual, t=torch.full((10, 1), 2.0, dtype=torch.float64)
    )
    at_optimum = simulation.state
    simulation.step()
    for before, after in list(zip(at_optimum, simulation.state, strict=True))[:-1]:
        assert (before - after).abs().max() < 1e-13


def test_momentum_is_fista_for_rho_0_and_settles_otherwise():
    one = torch.ones(1, 1, dtype=torch.float64)
    assert momentum(one, 0.3)[1] == 0  # no momentum in the first round
    golden = (1 + math.sqrt(5)) / 2
    assert momentum(one, 0.0)[0] == pytest.approx(golden, abs=1e-15)
    t, rho = one, 0.04
    for _ in range(400):
        t, beta = momentum(t, rho)
    assert t == pytest.approx(1 / math.sqrt(rho), abs=1e-12)
    assert beta == pytest.approx((1 - math.sqrt(rho)) / (1 + math.sqrt(rho)), abs=1e-12)


KNOWN = [  # final error, fitted factor per round: an independent implementation's
    (DualFL(nu=MU, rho=MU / L), 150, 1e-13, 0.694),
    (DualFL(nu=MU / 2, rho=MU / 2 / L), 200, 1e-12, 0.783),
    (DualFL(nu=MU, rho=0.0), 600, 1e-11, 0.941),
]


@pytest.mark.parametrize(("algorithm", "rounds", "error", "factor"), KNOWN, ids=str)
def test_it_reaches_the_optimum_at_the_known_rate(reference, algorithm, rounds, error, factor):
    path = reference.run(algorithm, rounds)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < error
    assert measured_decay(reference, path) == pytest.approx(factor, abs=0.005)


# --- smooth and strongly convex ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "rounds"), [(10, 150), (100, 400), (1000, 1000)])
def test_the_factor_per_round_is_that_of_theorem_3_3(kappa, rounds):
    problem = ill_conditioned(kappa)
    path = problem.run(DualFL.for_problem(1 / kappa, 1.0, solver=NewtonStep()), rounds)
    assert (path[-1] - problem.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(problem, path) <= math.sqrt(1 - 1 / math.sqrt(kappa)) + 0.01


def test_rounds_grow_like_the_root_of_kappa_and_those_of_gradient_descent_like_kappa():
    def rounds(kappa: float, algorithm, limit: int) -> int:
        problem = ill_conditioned(kappa)
        return rounds_to(1e-8, problem.run(algorithm, limit), problem.optimum)

    kappas = [10.0, 100.0, 1000.0]
    dualfl = [rounds(k, DualFL.for_problem(1 / k, 1.0, solver=NewtonStep()), 800) for k in kappas]
    assert 0.4 <= power(kappas, dualfl) <= 0.6
    kappas = [10.0, 30.0, 100.0]
    descent = [rounds(k, FedAvg(lr=1.0), 2200) for k in kappas]
    assert power(kappas, descent) == pytest.approx(1, abs=0.05)
    assert descent[-1] > 5 * dualfl[1]


def test_too_large_a_momentum_parameter_costs_rounds_but_not_the_limit():
    problem = ill_conditioned(100)
    tuned, large = (
        rounds_to(1e-8, problem.run(DualFL(nu=0.01, rho=rho, solver=NewtonStep()), 2000), problem.optimum)
        for rho in (0.01, 0.1)
    )
    assert tuned < large


@pytest.mark.parametrize(("rule", "nu"), [("strong-convexity", 0.9 * MU), ("dual-point", MU)])
def test_local_solves_need_not_be_more_exact_than_the_theorem_asks(reference, rule, nu):
    """(3.8): the rate is kept for less than half the work of the experiments' rule."""
    bounded = simulate(DualFL.for_problem(MU, L, nu=nu, solver=AOGM(), gap_rule=rule), reference)
    exact = simulate(DualFL.for_problem(MU, L, nu=nu, solver=AOGM()), reference)
    start, factor = (bounded.models - reference.optimum).norm(dim=-1).max(), math.sqrt(1 - math.sqrt(nu / L))
    for n in range(1, 41):
        bounded.step()
        exact.step()
        assert (bounded.models - reference.optimum).norm(dim=-1).max() <= 2 * start * factor**n
    assert (bounded.models - exact.models).abs().max() > 1e-8  # the tolerance is felt
    assert bounded.work.gradient_evaluations < exact.work.gradient_evaluations / 2
    assert bounded.work.unfinished_solves == 0


def test_the_allowed_gradient_norm_follows_the_theorems():
    """sqrt(2 nu Gamma), Gamma = (1 - sqrt(rho))^n / (N 1.01^n) or 1 / (N nu (n + 1)^4.01)."""
    smooth = DualFL(nu=0.5, rho=0.25, gap_rule="dual-point")
    assert smooth.gradient_norm(2, nodes=8) == pytest.approx(math.sqrt((0.5 / 1.01) ** 2 / 8))
    nonsmooth = DualFL(nu=0.5, gap_rule="dual-point")
    assert nonsmooth.gradient_norm(1, nodes=8) == pytest.approx(math.sqrt(1 / (8 * 0.5 * 2**4.01)))
    assert DualFL(nu=0.5, rho=0.25).gradient_norm(2, nodes=8) is None


# --- nonsmooth and strongly convex ------------------------------------------------------------------------


def test_the_error_falls_like_one_over_the_rounds_on_the_l1_problem():
    """f_j = (1/2)(u - b_j)^T D_j (u - b_j) + l1 ||u||_1 with diagonal D_j: Theorem 3.2."""
    generator = torch.Generator().manual_seed(0)
    diagonal = 0.5 + 4.5 * torch.rand(10, 12, generator=generator, dtype=torch.float64)
    b = 3 * torch.randn(10, 12, generator=generator, dtype=torch.float64)
    l1 = 1.5
    optimum = soft_threshold((diagonal * b).mean(0), l1) / diagonal.mean(0)
    assert 0 < (optimum == 0).sum() < 12
    path = Quadratics(torch.diag_embed(diagonal), b).run(DualFL(nu=0.5, solver=SoftThreshold(l1)), 400)
    error = (path[:, 0] - optimum).norm(dim=-1)
    assert (torch.arange(401) * error).max() < 2 * error[0]  # O(1/n) from the first round on
    assert error[100] < 1e-3
    assert error[-1] < 1e-9


# --- merely convex ----------------------------------------------------------------------------------------


def regularised_optimum(problem: Quadratics, alpha: float) -> torch.Tensor:
    A = problem.A.mean(0) + alpha * torch.eye(problem.dim, dtype=torch.float64)
    return torch.linalg.solve(A, (problem.A @ problem.b[..., None]).mean(0)).squeeze(-1)


def common_gradient(problem: Quadratics, x: torch.Tensor) -> float:
    return float(problem.grads(x.expand(problem.nodes, -1)).mean(0).norm())


def test_the_regularised_method_ends_at_its_floor_after_rounds_like_one_over_root_alpha():
    """Theorem 4.2: ||grad E|| tends to alpha ||theta_alpha||."""
    problem = merely_convex()
    assert torch.linalg.eigvalsh(problem.A).min() < 1e-12
    alphas, rounds = [0.1, 0.01, 0.001], []
    for alpha in alphas:
        goal = regularised_optimum(problem, alpha)
        path = problem.run(DualFL.for_problem(0.0, 1.0, alpha=alpha, solver=NewtonStep()), 800)
        floor = alpha * goal.norm()
        assert common_gradient(problem, path[-1, 0]) == pytest.approx(float(floor), rel=1e-9)
        rounds.append(rounds_to(1e-6, path, goal))
    assert -0.6 <= power(alphas, rounds) <= -0.4


def test_continuation_goes_below_the_first_floor():
    problem, every = merely_convex(), 150
    algorithm = DualFL.for_problem(0.0, 1.0, alpha=0.1, shrink_alpha_every=every, solver=NewtonStep())
    path = problem.run(algorithm, 3 * every)
    for stage, alpha in enumerate([0.1, 0.01, 0.001], start=1):
        floor = alpha * regularised_optimum(problem, alpha).norm()
        assert common_gradient(problem, path[stage * every, 0]) == pytest.approx(float(floor), rel=0.01)


def test_continuation_divides_all_three_parameters():
    algorithm = DualFL.for_problem(0.0, 3.0, alpha=1.0, shrink_alpha_every=5)
    assert (algorithm.nu, algorithm.rho, algorithm.alpha) == (1.0, 0.25, 1.0)
    assert algorithm.at(4) == algorithm
    later = algorithm.at(10)
    assert (later.nu, later.rho, later.alpha) == pytest.approx((0.01, 0.0025, 0.01))


# --- parameters -------------------------------------------------------------------------------------------


def test_the_theorems_parameters():
    assert DualFL.for_problem(0.5, 5.0) == DualFL(nu=0.5, rho=0.1)
    assert DualFL.for_problem(0.5) == DualFL(nu=0.5, rho=0.0)
    assert DualFL.for_problem(0.5, 5.0, nu=0.25) == DualFL(nu=0.25, rho=0.05)
    assert DualFL.for_problem(0.0, 3.0, alpha=1.0) == DualFL(nu=1.0, rho=0.25, alpha=1.0)
    assert DualFL.for_problem(2.0, 2.0).rho == 0  # one round is enough


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DualFL(nu=0.0), r"DualFL.nu: should be greater than 0, got 0.0"),
        (lambda: DualFL(nu=-1.0), r"DualFL.nu: should be greater than 0, got -1.0"),
        (lambda: DualFL(nu=1.0, rho=1.0), r"DualFL.rho: should be less than 1, got 1.0"),
        (lambda: DualFL(nu=1.0, rho=-0.1), r"DualFL.rho: should be greater than or equal to 0, got -0.1"),
        (lambda: DualFL(nu=1.0, alpha=-1.0), r"DualFL.alpha: should be greater than or equal to 0, got -1.0"),
        (lambda: DualFL(nu=1.0, shrink_alpha_every=5), r"there is no alpha to shrink; give alpha too"),
        (lambda: DualFL(nu=1.0, mu=2.0), r"DualFL.mu: only the gap_rule 'strong-convexity' uses it"),
        (
            lambda: DualFL.for_problem(0.5, 5.0, gap_rule="strong-convexity"),
            r"'strong-convexity' needs nu < mu, got nu = 0.5 and mu = 0.5",
        ),
        (lambda: DualFL.for_problem(0.5, nu=0.6), r"nu: should be at most mu \+ alpha = 0.5, got 0.6"),
        (lambda: DualFL.for_problem(0.5, 0.4), r"L: should be at least mu = 0.5, got 0.4"),
        (lambda: DualFL.for_problem(0.0, 1.0), r"mu: should be greater than 0 unless alpha is given, got 0"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(hf.HoldfastError, match=message):
        make()


def test_a_graph_and_a_cohort_are_refused(quadratics):
    with pytest.raises(hf.HoldfastError, match=r"DualFL needs a server"):
        quadratics.run(DualFL(nu=MU), 1, hf.ring(10))
    with pytest.raises(hf.HoldfastError, match=r"DualFL needs every node in every round"):
        quadratics.run(DualFL(nu=MU), 1, cohort=3)
