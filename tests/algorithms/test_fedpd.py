"""FedPD: its identities, where it ends, and what bad input gets."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import L, contraction, measured_decay, reference_quadratics
from server_runs import assert_same, simulate, stochastic_digits

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.contract.parameters import linear
from holdfast.core.randomness import coin
from holdfast.core.tree import leaves

SAFE = 0.9 * (math.sqrt(5) - 1) / (4 * L)  # nine tenths of the largest eta that Theorem 1 allows


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


# --- identities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [0.0, 0.5])
def test_with_exact_solves_the_dual_is_minus_the_gradient(reference, skip):
    simulation = simulate(FedPD(eta=0.3, solver="exact", skip=skip), reference)
    for _ in range(30):
        simulation.step()
        assert (simulation.state.dual + reference.grads(simulation.state.x)).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (FedPD(eta=0.3, solver="exact"), "quadratics"),
        (FedPD(eta=0.3, solver="gd", lr=0.1, local_steps=3), "quadratics"),
        (FedPD(eta=0.1, lr=0.05, local_steps=3), "digits"),
        (FedPD(eta=0.1, solver="vr", local_steps=3), "digits"),
    ],
)
def test_the_mean_dual_is_the_mean_models_last_move(algorithm, problem, reference):
    """mean dual^{r+1} = (mean x^{r+1} - mean x^r) / eta from the second round on, whatever the solver."""
    objective = reference if problem == "quadratics" else stochastic_digits()
    simulation = simulate(algorithm, objective, rounds=1)
    for _ in range(3):
        before = simulation.state.x.mean(0)
        simulation.step()
        moved = simulation.state.x.mean(0) - before
        assert torch.allclose(simulation.state.dual.mean(0), moved / algorithm.eta, rtol=0, atol=1e-12)
    assert simulation.state.dual.abs().max() > 1e-3


def test_exact_fedpd_is_feddyn(reference):
    """alpha = 1/eta and lambda_i = -g_i."""
    fedpd = simulate(FedPD(eta=0.3, solver="exact"), reference)
    feddyn = simulate(FedDyn(alpha=1 / 0.3, solver="exact"), reference)
    for _ in range(40):
        fedpd.step()
        feddyn.step()
        assert_same(fedpd.models, feddyn.models)
        assert_same(fedpd.state.dual, -feddyn.state.clients.g)


def test_exact_fedpd_is_feddyn_on_functions_that_are_not_quadratic():
    targets = torch.tensor([[-2.0, 1.0], [3.0, 0.5], [0.5, -4.0]], dtype=torch.float64)
    functions = [lambda x, b=b: torch.log(torch.cosh(x - b)).sum() + 0.1 * x @ x for b in targets]
    fedpd = hf.minimize(functions, [0.0, 0.0], FedPD(eta=0.5, solver="exact"), 12).x
    assert_same(fedpd, hf.minimize(functions, [0.0, 0.0], FedDyn(alpha=2.0, solver="exact"), 12).x)


def test_vr_without_minibatches_is_gradient_descent(reference):
    """The minimiser of the linearised Lagrangian is a gradient step of size eta gamma / (eta + gamma)."""
    eta, gamma = 0.1, 0.25
    gd = FedPD(eta=eta, solver="gd", lr=eta * gamma / (eta + gamma), local_steps=4)
    for refresh_every in (1, 1000):
        vr = FedPD(eta=eta, solver="vr", local_steps=4, gamma=gamma, refresh_every=refresh_every)
        assert_same(reference.run(gd, 60), reference.run(vr, 60))


def test_gamma_is_four_eta_by_default(reference):
    default = FedPD(eta=0.1, solver="vr", local_steps=2)
    assert_same(reference.run(default, 9), reference.run(FedPD(0.1, "vr", local_steps=2, gamma=0.4), 9))


# --- where it ends --------------------------------------------------------------------------------------


KNOWN = [  # the algorithm, fitted factor per round and spectral radius: an independent implementation's
    (FedPD(eta=SAFE, solver="exact"), 0.917, 0.920),
    (FedPD(eta=0.3, solver="exact"), 0.626, 0.627),
    (FedPD(eta=SAFE, solver="gd", lr=1 / (L + 1 / SAFE)), 0.929, 0.932),
    (FedPD(eta=SAFE, solver="gd", lr=1 / (L + 1 / SAFE), local_steps=8), 0.917, 0.920),
]


@pytest.mark.parametrize(("algorithm", "factor", "radius"), KNOWN)
def test_it_reaches_the_optimum_at_the_known_rate(reference, algorithm, factor, radius):
    path = reference.run(algorithm, 450)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(reference, path) == pytest.approx(factor, abs=0.005)
    assert contraction(reference, algorithm)[0] == pytest.approx(radius, abs=0.001)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedPD(eta=SAFE, solver="vr", local_steps=8),
        FedPD(eta=SAFE, solver="vr", local_steps=2, refresh_every=100),
        FedPD(eta=0.3, lr=0.1, local_steps=4),  # its minibatch is everything here
    ],
)
def test_the_other_solvers_reach_the_optimum_too(reference, algorithm):
    models = reference.run(algorithm, 450)[-1]
    assert (models - reference.optimum).norm(dim=-1).max() < 1e-10


def test_the_optimum_is_a_fixed_point(reference):
    star = reference.optimum.expand(10, -1)
    for solver in ({"solver": "exact"}, {"lr": 0.1, "local_steps": 3}):
        simulation = simulate(FedPD(eta=0.3, skip=0.5, **solver), reference)
        at_optimum = simulation.state._replace(x=star, common=star, dual=-reference.grads(star))
        simulation.state = at_optimum
        # A round that communicates: without it every node would follow its own dual.
        while coin(3, simulation.round, 1, 0.5):
            simulation.round += 1
        simulation.step()
        for before, after in zip(leaves(at_optimum), leaves(simulation.state), strict=True):
            assert (before - after).abs().max() < 1e-13


# --- what bad input gets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lr": 0.1, "skip": 1.0},
            r"FedPD.skip: should be less than 1, got 1.0: nodes would never communicate",
        ),
        ({"lr": 0.1, "skip": 1.5}, r"skip: should be less than or equal to 1, got 1.5"),
        ({"lr": 0.1, "skip": -0.1}, r"skip: should be greater than or equal to 0, got -0.1"),
        ({"lr": 0.1, "skip": float("nan")}, r"skip: .* got nan"),
        ({"lr": 0.1, "skip": 0.5, "communicate_every": 2}, r"either skip or communicate_every, not both"),
        ({"lr": 0.1, "skip": linear(1.0, 9), "communicate_every": 2}, r"either skip or communicate_every"),
        (
            {"lr": 0.1, "communicate_every": 0},
            r"communicate_every: should be greater than or equal to 1, got 0",
        ),
        ({"lr": 0.1, "solver": "adam"}, r"solver: should be 'exact', 'gd', 'sgd' or 'vr', got 'adam'"),
        ({}, r"FedPD.lr: the solver 'sgd' needs a step size; give lr"),
        ({"solver": "gd"}, r"FedPD.lr: the solver 'gd' needs a step size"),
        (
            {"solver": "exact", "lr": 0.1},
            r"FedPD.lr: the solver 'exact' does not use it, got 0.1; leave it out .* 'gd' or 'sgd'$",
        ),
        ({"solver": "vr", "lr": lambda round: 0.1}, r"FedPD.lr: the solver 'vr' does not use it"),
        ({"solver": "exact", "local_steps": 2}, r"FedPD.local_steps: the solver 'exact' does not use it"),
        ({"lr": 0.1, "tolerance": 1e-3}, r"FedPD.tolerance: the solver 'sgd' .* choose the solver 'gd'$"),
        ({"solver": "gd", "lr": 0.1, "decreasing": True}, r"FedPD.decreasing: .* choose the solver 'sgd'$"),
        ({"lr": 0.1, "refresh_every": 5}, r"FedPD.refresh_every: .* choose the solver 'vr'$"),
        ({"lr": 0.1, "gamma": 5.0}, r"FedPD.gamma: .* choose the solver 'vr'$"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(hf.HoldfastError, match=message):
        FedPD(eta=0.1, **options)
    with pytest.raises(hf.HoldfastError, match=message):
        ALGORITHMS.build("fedpd", {"eta": 0.1, **options})


def test_eta_is_required():
    with pytest.raises(hf.HoldfastError, match=r"'eta' is missing"):
        ALGORITHMS.build("fedpd", {"lr": 0.1})


@pytest.mark.parametrize("nonsense", [1.5, -0.5, float("nan")])
def test_a_schedule_of_nonsense_names_the_round(reference, nonsense):
    algorithm = FedPD(eta=0.1, lr=0.05, skip=lambda round: 0.5 if round < 3 else nonsense)
    with pytest.raises(hf.HoldfastError, match=rf"FedPD.skip at round 3: .* got {nonsense}"):
        reference.run(algorithm, 5)


def test_a_graph_and_cohorts_are_refused(reference):
    with pytest.raises(hf.HoldfastError, match=r"FedPD needs a server"):
        reference.run(FedPD(eta=0.1, lr=0.05), 1, hf.ring(10))
    with pytest.raises(hf.HoldfastError, match=r"cohort: FedPD needs every node in every round"):
        reference.run(FedPD(eta=0.1, lr=0.05), 1, cohort=3)
