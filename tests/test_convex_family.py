"""FedDR, FedSplit, FedDualAvg, Scaffnew, APDA-Inexact and 5GCS: equivalences, invariants, rates."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from dual_problems import soft_threshold
from linear_rounds import MU, L, contraction, measured_decay, reference_quadratics
from test_equivalences import assert_same
from test_invariants import stochastic_digits

import holdfast as hf
from holdfast.algorithms.apda import APDAInexact
from holdfast.algorithms.feddr import FedDR, FedSplit
from holdfast.algorithms.feddualavg import FedDualAvg
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.algorithms.fivegcs import FiveGCS
from holdfast.algorithms.scaffnew import Scaffnew
from holdfast.engines.simulate.simulation import Federation, Simulation
from holdfast.solvers import AOGM, SGD
from holdfast.tree import leaves

BEST = 1 / math.sqrt(MU * L)
FEW_STEPS = SGD(lr=0.1, steps=3)


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


@pytest.fixture(scope="module")
def digits():
    return stochastic_digits()


def simulate(algorithm, problem, cohort: int | None = None) -> Simulation:
    return Simulation(algorithm, problem, hf.server(problem.nodes), seed=3, cohort_size=cohort)


# --- the same method under several names -----------------------------------------------------------------


def test_fedpd_is_feddyn_is_feddr_with_relaxation_1(reference):
    """With exact local solves. FedDR's initial proximal steps are its first round, so nothing is shifted."""
    eta = 0.3
    fedpd = reference.run(FedPD(eta=eta, solver="exact"), 40)
    assert_same(fedpd, reference.run(FedDyn(alpha=1 / eta, solver="exact"), 40))
    assert_same(fedpd, reference.run(FedDR(eta=eta, alpha=1.0), 40))


def test_fedsplit_is_feddr_with_relaxation_2(reference):
    assert_same(reference.run(FedSplit(eta=BEST), 40), reference.run(FedDR(eta=BEST, alpha=2.0), 40))


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.9])
def test_feddr_is_the_papers_one_round_later(reference, alpha):
    """y_i = x0, x_i = prox(y_i), server = mean of 2 x_i - y_i before the first round (authors' code)."""
    eta, eye = 0.4, torch.eye(6, dtype=torch.float64)

    def prox(y):
        right = reference.A @ reference.b[..., None] + y[..., None] / eta
        return torch.linalg.solve(reference.A + eye / eta, right).squeeze(-1)

    y = torch.zeros_like(reference.b)
    x = prox(y)
    expected = [(2 * x - y).mean(0)]
    for _ in range(30):
        y = y + alpha * (expected[-1] - x)
        x = prox(y)
        expected.append((2 * x - y).mean(0))
    assert_same(torch.stack(expected), reference.run(FedDR(eta=eta, alpha=alpha), 31)[1:, 0])


@pytest.mark.parametrize("server_lr", [1.0, 1.5])
@pytest.mark.parametrize("cohort", [None, 3])
def test_feddualavg_without_regulariser_is_fedavg(digits, reference, server_lr, cohort):
    for problem in (digits, reference):
        dual = simulate(FedDualAvg(lr=0.02, local_steps=5, server_lr=server_lr), problem, cohort)
        plain = simulate(hf.FedAvg(lr=0.02, local_steps=5, server_lr=server_lr), problem, cohort)
        for _ in range(10):
            dual.step()
            plain.step()
        assert_same(dual.models, plain.models)


def test_scaffnew_that_always_communicates_is_gradient_descent(reference):
    assert_same(reference.run(Scaffnew(lr=0.1, p=1.0), 40), reference.run(hf.FedAvg(lr=0.1), 40))


# --- what holds after every round ------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize("alpha", [1.0, 1.9])
def test_feddr_server_is_the_mean_of_all_reflected_points(digits, reference, alpha, cohort):
    """Also of the clients that have not yet taken part: a wrong start would stay for ever."""
    for problem, algorithm in (
        (digits, FedDR(eta=1.0, alpha=alpha, solver=FEW_STEPS)),
        (reference, FedDR(eta=BEST, alpha=alpha)),
    ):
        simulation = simulate(algorithm, problem, cohort)
        for _ in range(15):
            simulation.step()
            server, clients = simulation.state
            assert torch.allclose(server.x, (2 * clients.x - clients.y).mean(0), rtol=0, atol=1e-12)
        assert (clients.x - clients.y).abs().max() > 1e-3


@pytest.mark.parametrize("cohort", [None, 3])
def test_5gcs_server_dual_is_the_mean_of_all_clients(digits, reference, cohort):
    for problem, algorithm in (
        (digits, FiveGCS(lr=0.3, mu=0.1, solver=FEW_STEPS)),
        (reference, FiveGCS(lr=0.3, mu=MU)),
    ):
        simulation = simulate(algorithm, problem, cohort)
        for _ in range(15):
            simulation.step()
            server, clients = simulation.state
            assert torch.allclose(server.v, clients.u.mean(0), rtol=0, atol=1e-12)
        assert server.v.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (Scaffnew(lr=0.05, p=0.3), "h"),
        (APDAInexact(lr=0.3, beta=0.05, mu=0.0, dual_lr=1.0, solver=FEW_STEPS), "y"),
    ],
    ids=["scaffnew", "apda"],
)
def test_corrections_sum_to_zero(digits, reference, algorithm, name):
    for problem in (digits, reference):
        simulation = simulate(algorithm, problem)
        for _ in range(15):
            simulation.step()
            correction = getattr(simulation.state, name)
            size = correction.abs().max()
            assert correction.sum(0).abs().max() <= 1e-12 * size * len(correction)
        assert size > 1e-3


# --- where they end, and how fast ------------------------------------------------------------------------


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
    path = reference.run(algorithm, 450, cohort_size=3)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10


@pytest.mark.parametrize(
    "algorithm",
    [
        FedDR(eta=0.3, solver=SGD(lr=0.12, steps=5)),
        FedSplit(eta=0.3, solver=SGD(lr=0.12, steps=20)),
        APDAInexact(lr=0.1, beta=0.2, mu=MU, solver=SGD(lr=1 / 15, steps=3)),
        FiveGCS(lr=0.3, mu=MU, solver=SGD(lr=0.16, steps=5)),
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


def assert_stays(simulation: Simulation, at_optimum: Federation) -> None:
    before = [tensor.clone() for tensor in leaves(at_optimum)]
    simulation.state = at_optimum
    simulation.step()
    for old, new in zip(before, leaves(simulation.state), strict=True):
        assert (old - new).abs().max() < 1e-12


@pytest.mark.parametrize("cohort", [None, 3])
def test_the_optimum_is_a_fixed_point(reference, cohort):
    star = reference.optimum
    own = reference.grads(star.expand(10, -1))
    feddr = simulate(FedDR(eta=BEST, alpha=1.9), reference, cohort)
    server, clients = feddr.state
    clients = clients._replace(y=star + BEST * own, x=star.repeat(10, 1))
    assert_stays(feddr, Federation(server._replace(x=star), clients))
    fivegcs = simulate(FiveGCS(lr=0.3, mu=MU), reference, cohort)
    server, clients = fivegcs.state
    clients = clients._replace(u=own - MU * star)
    assert_stays(fivegcs, Federation(server._replace(x=star, v=-MU * star), clients))


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


# --- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedDR(eta=0.0), r"FedDR.eta: should be greater than 0, got 0.0"),
        (lambda: FedDR(eta=1.0, alpha=0.0), r"FedDR.alpha: should be greater than 0, got 0.0"),
        (lambda: FedDR(eta=1.0, alpha=2.1), r"FedDR.alpha: should be less than or equal to 2, got 2.1"),
        (lambda: FedSplit(eta=-1.0), r"FedSplit.eta: should be greater than 0, got -1.0"),
        (lambda: FedDualAvg(lr=0.1, l1=-1.0), r"FedDualAvg.l1: should be greater than or equal to 0"),
        (lambda: FedDualAvg(lr=0.1, local_steps=0), r"FedDualAvg.local_steps: should be greater than or"),
        (lambda: Scaffnew(lr=0.1, p=0.0), r"Scaffnew.p: should be greater than 0, got 0.0"),
        (lambda: Scaffnew(lr=0.1, p=1.5), r"Scaffnew.p: should be less than or equal to 1, got 1.5"),
        (lambda: APDAInexact(lr=0.1, beta=0.0, mu=1.0), r"APDAInexact.beta: should be greater than 0"),
        (lambda: FiveGCS(lr=0.1, mu=-1.0), r"FiveGCS.mu: should be greater than or equal to 0, got -1.0"),
        (lambda: FedDR(eta=1.0, solver="exact"), r"FedDR.solver: .*'exact'"),
    ],
)
def test_bad_parameters_are_refused(make, message):
    with pytest.raises(hf.HoldfastError, match=message):
        make()


@pytest.mark.parametrize(
    "algorithm",
    [FedDR(eta=1.0), FedSplit(eta=1.0), Scaffnew(lr=0.1, p=1.0), APDAInexact(lr=0.1, beta=0.1, mu=0.1)],
    ids=str,
)
def test_a_graph_is_refused(reference, algorithm):
    with pytest.raises(hf.HoldfastError, match=r"needs a server: use the topology 'server', not a graph"):
        reference.run(algorithm, 1, hf.ring(10))


@pytest.mark.parametrize(
    "algorithm", [FedSplit(eta=1.0), Scaffnew(lr=0.1, p=1.0), APDAInexact(lr=0.1, beta=0.1, mu=0.1)], ids=str
)
def test_methods_of_all_nodes_refuse_a_cohort(reference, algorithm):
    with pytest.raises(hf.HoldfastError, match=r"needs every node in every round"):
        reference.run(algorithm, 1, cohort_size=3)


def test_feddualavg_takes_the_l2_of_the_objective_out_of_its_gradients(reference):
    l2 = MU / 2
    own = without_l2(reference, l2).run(FedDualAvg(lr=0.02, local_steps=5, l2=l2), 40)
    there = reference.run(FedDualAvg(lr=0.02, local_steps=5, l2=l2, l2_in_objective=True), 40)
    assert_same(own, there)


def test_fedpd_and_feddyn_take_any_local_solver(reference):
    by_steps = AOGM(stop="gradient", tolerance=1e-10)
    for exact, nearly in (
        (FedPD(eta=0.3, solver="exact"), FedPD(eta=0.3, solver=by_steps)),
        (FedDyn(alpha=2.0, solver="exact"), FedDyn(alpha=2.0, solver=by_steps)),
    ):
        assert (reference.run(exact, 3) - reference.run(nearly, 3)).abs().max() < 1e-8
    with pytest.raises(hf.HoldfastError, match=r"FedPD.lr: the solver AOGM.* does not use it"):
        FedPD(eta=0.3, solver=by_steps, lr=0.1)
