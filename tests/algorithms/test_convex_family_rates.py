"""FedDR, FedSplit, FedDualAvg, Scaffnew, APDA-Inexact and 5GCS: where they end, and how fast."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from dual_problems import soft_threshold
from linear_rounds import MU, L, contraction, measured_decay, reference_quadratics
from server_runs import assert_same, simulate

from holdfast.algorithms.apda import APDAInexact
from holdfast.algorithms.feddr import FedDR, FedSplit
from holdfast.algorithms.feddualavg import FedDualAvg
from holdfast.algorithms.fivegcs import FiveGCS
from holdfast.algorithms.scaffnew import Scaffnew
from holdfast.core.tree import leaves
from holdfast.engines.common.rounds import ServerState
from holdfast.engines.common.simulation import Simulation
from holdfast.solvers import StochasticGradientDescent

pytestmark = pytest.mark.slow  # minutes in all; they say where methods end

BEST = 1 / math.sqrt(MU * L)


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


KNOWN = [  # rounds, fitted factor per round, spectral radius: an independent implementation's
    (FedSplit(eta=BEST), 80, 0.497, 0.51949),
    (FedDR(eta=BEST, alpha=1.0), 120, 0.750, 0.7597),
    (FedDR(eta=BEST, alpha=1.9), 80, 0.523, 0.5435),
    (FedDR(eta=BEST, alpha=2.0), 80, 0.498, 0.51949),
    (APDAInexact(lr=0.1, beta=0.2, mu=MU), 400, 0.932, 0.9375),
    (FiveGCS(lr=0.3, mu=MU), 100, 0.699, 0.730),
]


@pytest.mark.parametrize(("algorithm", "rounds", "factor", "radius"), KNOWN, ids=str)
def test_they_reach_the_optimum_at_the_known_rate(reference, algorithm, rounds, factor, radius):
    path = reference.run(algorithm, rounds)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(reference, path) == pytest.approx(factor, abs=0.005)
    assert contraction(reference, algorithm)[0] == pytest.approx(radius, abs=0.001)


def test_fedsplit_contracts_exactly_as_its_theory_says(reference):
    """1 - 2/(sqrt(kappa) + 1)"""
    radius, _ = contraction(reference, FedSplit(eta=BEST))
    assert radius == pytest.approx(1 - 2 / (math.sqrt(L / MU) + 1), abs=1e-9)


@pytest.mark.parametrize(
    "algorithm", [FedDR(eta=BEST, alpha=1.9), FedDR(eta=BEST), FiveGCS(lr=0.3, mu=MU)], ids=str
)
def test_sampled_cohorts_reach_the_optimum(reference, algorithm):
    path = reference.run(algorithm, 450, cohort=3)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10


@pytest.mark.parametrize(
    "algorithm",
    [
        FedDR(eta=0.3, solver=StochasticGradientDescent(lr=0.12, steps=5)),
        FedSplit(eta=0.3, solver=StochasticGradientDescent(lr=0.12, steps=20)),
        APDAInexact(lr=0.1, beta=0.2, mu=MU, solver=StochasticGradientDescent(lr=1 / 15, steps=3)),
        FiveGCS(lr=0.3, mu=MU, solver=StochasticGradientDescent(lr=0.16, steps=5)),
    ],
    ids=str,
)
def test_inexact_local_solves_keep_the_limit(reference, algorithm):
    """Steps with exact gradients, warm-started: the local error dies out with the rounds."""
    path = reference.run(algorithm, 500)
    assert (path[-1].mean(0) - reference.optimum).norm() < 1e-10


def test_a_larger_dual_step_makes_apda_faster_than_its_conservative_default(reference):
    default, larger = (
        APDAInexact(lr=0.3, beta=0.05, mu=MU),
        APDAInexact(lr=0.3, beta=0.05, mu=MU, dual_lr=1 / 0.3),
    )
    assert contraction(reference, default)[0] > 0.97
    assert contraction(reference, larger)[0] == pytest.approx(0.60, abs=0.01)


def assert_stays(simulation: Simulation, at_optimum: ServerState) -> None:
    before = [tensor.clone() for tensor in leaves(at_optimum)]
    simulation.state = at_optimum
    simulation.step()
    for old, new in zip(before, leaves(simulation.state), strict=True):
        assert (old - new).abs().max() < 1e-12


@pytest.mark.parametrize("cohort", [None, 3])
def test_the_optimum_is_a_fixed_point(reference, cohort):
    star = reference.optimum
    own = reference.grads(star.expand(10, -1))
    feddr = simulate(FedDR(eta=BEST, alpha=1.9), reference, cohort=cohort)
    server, clients = feddr.state
    clients = clients._replace(y=star + BEST * own, x=star.repeat(10, 1))
    assert_stays(feddr, ServerState(server._replace(x=star), clients))
    fivegcs = simulate(FiveGCS(lr=0.3, mu=MU), reference, cohort=cohort)
    server, clients = fivegcs.state
    clients = clients._replace(u=own - MU * star)
    assert_stays(fivegcs, ServerState(server._replace(x=star, v=-MU * star), clients))


# --- Scaffnew --------------------------------------------------------------------------------------------


def test_scaffnew_reaches_the_optimum_within_its_bound(reference):
    """Per step the Lyapunov function falls by 1 - min(lr mu, p^2) = 0.9 at least, in the mean."""
    simulation = simulate(Scaffnew(lr=1 / L, p=math.sqrt(MU / L)), reference)
    star, lr, p = reference.optimum, 1 / L, math.sqrt(MU / L)
    own = reference.grads(star.expand(10, -1))

    def lyapunov() -> float:
        s = simulation.state
        return float((s.x - star).square().sum() + (lr / p) ** 2 * (s.h - own).square().sum())

    start = lyapunov()
    for _ in range(60):
        simulation.step()
    steps = simulation.work.gradient_evaluations / 10
    assert (lyapunov() / start) ** (1 / steps) < 0.9
    for _ in range(60):
        simulation.step()
    assert (simulation.models - star).norm(dim=-1).max() < 1e-10
    assert (simulation.state.h - own).abs().max() < 1e-9


def test_scaffnew_rounds_are_geometric(reference):
    """1/p steps on average, a single one with probability p; one exchange each."""
    p, rounds = 0.2, 250
    simulation = simulate(Scaffnew(lr=0.01, p=p), reference)
    lengths = []
    for _ in range(rounds):
        before = simulation.work.gradient_evaluations
        simulation.step()
        lengths.append((simulation.work.gradient_evaluations - before) // 10)
    lengths = torch.tensor(lengths, dtype=torch.float64)
    deviation = math.sqrt((1 - p) / p**2 / rounds)
    assert lengths.mean() == pytest.approx(1 / p, abs=3 * deviation)
    assert (lengths == 1).double().mean() == pytest.approx(p, abs=3 * math.sqrt(p * (1 - p) / rounds))
    assert simulation.traffic.numbers == rounds * 2 * 10 * reference.dim


# --- FedDualAvg ------------------------------------------------------------------------------------------


def without_l2(problem: Quadratics, l2: float) -> Quadratics:
    """f_i - (l2/2) ||x||^2 up to a constant, as (A_i - l2 I, b_i') with the same gradient."""
    A = problem.A - l2 * torch.eye(problem.dim, dtype=torch.float64)
    b = torch.linalg.solve(A, (problem.A @ problem.b[..., None])).squeeze(-1)
    return Quadratics(A, b)


def test_feddualavg_forgets_its_bias_like_one_over_the_rounds(reference):
    smooth = without_l2(reference, MU / 2)
    path = smooth.run(FedDualAvg(lr=0.02, local_steps=10, l2=MU / 2), 2000)
    error = (path[:, 0] - reference.optimum).norm(dim=-1)
    assert error[2000] < 0.01
    assert error[200] / error[2000] == pytest.approx(10, rel=0.15)
    biased = reference.run(FedDualAvg(lr=0.02, local_steps=10), 300)[-1, 0]
    assert (biased - reference.optimum).norm() == pytest.approx(0.199, rel=0.01)


def test_feddualavg_finds_the_zeros_of_an_l1_problem():
    """One local step on diagonal quadratics: the optimum is a soft threshold, known in closed form."""
    generator = torch.Generator().manual_seed(0)
    diagonal = 0.5 + torch.rand(10, 12, generator=generator, dtype=torch.float64)
    b = 3 * torch.randn(10, 12, generator=generator, dtype=torch.float64)
    l1, l2 = 1.0, 0.2
    optimum = soft_threshold((diagonal * b).mean(0), l1) / (diagonal.mean(0) + l2)
    path = Quadratics(torch.diag_embed(diagonal), b).run(FedDualAvg(lr=0.1, l1=l1, l2=l2), 2000)
    assert (path[-1, 0] - optimum).norm() < 0.01
    assert torch.equal(path[-1, 0] == 0, optimum == 0)
    assert 0 < (optimum == 0).sum() < 12


def test_feddualavg_takes_the_l2_of_the_objective_out_of_its_gradients(reference):
    l2 = MU / 2
    own = without_l2(reference, l2).run(FedDualAvg(lr=0.02, local_steps=5, l2=l2), 40)
    there = reference.run(FedDualAvg(lr=0.02, local_steps=5, l2=l2, l2_in_objective=True), 40)
    assert_same(own, there)
