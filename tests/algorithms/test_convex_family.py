"""FedDR, FedSplit, FedDualAvg, Scaffnew, APDA-Inexact and 5GCS: equivalences, invariants, parameters."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import MU, L, reference_quadratics
from server_runs import assert_same, simulate, stochastic_digits

import holdfast as hf
from holdfast.algorithms.apda import APDAInexact
from holdfast.algorithms.feddr import FedDR, FedSplit
from holdfast.algorithms.feddualavg import FedDualAvg
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.algorithms.fivegcs import FiveGCS
from holdfast.algorithms.scaffnew import Scaffnew
from holdfast.solvers import AOGM, StochasticGradientDescent

BEST = 1 / math.sqrt(MU * L)
FEW_STEPS = StochasticGradientDescent(lr=0.1, steps=3)


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


@pytest.fixture(scope="module")
def digits():
    return stochastic_digits()


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
        dual = simulate(FedDualAvg(lr=0.02, local_steps=5, server_lr=server_lr), problem, cohort=cohort)
        plain = simulate(hf.FedAvg(lr=0.02, local_steps=5, server_lr=server_lr), problem, cohort=cohort)
        for _ in range(10):
            dual.step()
            plain.step()
        assert_same(dual.models, plain.models)


def test_scaffnew_that_always_communicates_is_gradient_descent(reference):
    assert_same(reference.run(Scaffnew(lr=0.1, p=1.0), 40), reference.run(hf.FedAvg(lr=0.1), 40))


def test_fedpd_and_feddyn_take_any_local_solver(reference):
    by_steps = AOGM(stop="gradient", tolerance=1e-10)
    for exact, nearly in (
        (FedPD(eta=0.3, solver="exact"), FedPD(eta=0.3, solver=by_steps)),
        (FedDyn(alpha=2.0, solver="exact"), FedDyn(alpha=2.0, solver=by_steps)),
    ):
        assert (reference.run(exact, 3) - reference.run(nearly, 3)).abs().max() < 1e-8
    with pytest.raises(hf.HoldfastError, match=r"FedPD.lr: the solver AOGM.* does not use it"):
        FedPD(eta=0.3, solver=by_steps, lr=0.1)


# --- what holds after every round ------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [None, 3])
@pytest.mark.parametrize("alpha", [1.0, 1.9])
def test_feddr_server_is_the_mean_of_all_reflected_points(digits, reference, alpha, cohort):
    """Also of the clients that have not yet taken part: a wrong start would stay for ever."""
    for problem, algorithm in (
        (digits, FedDR(eta=1.0, alpha=alpha, solver=FEW_STEPS)),
        (reference, FedDR(eta=BEST, alpha=alpha)),
    ):
        simulation = simulate(algorithm, problem, cohort=cohort)
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
        simulation = simulate(algorithm, problem, cohort=cohort)
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
        reference.run(algorithm, 1, cohort=3)
