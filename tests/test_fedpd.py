"""FedPD: its four local solvers, its identities, where it converges, and communication that is skipped."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import MU, L, contraction, measured_decay, reference_quadratics
from test_equivalences import assert_same
from test_invariants import stochastic_digits

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.algorithms.schedules import constant, linear
from holdfast.engines.simulate.simulation import Simulation
from holdfast.objective.objective import FunctionObjective
from holdfast.randomness import coin
from holdfast.tree import leaves

SAFE = 0.9 * (math.sqrt(5) - 1) / (4 * L)  # nine tenths of the largest eta that Theorem 1 allows


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


def simulate(algorithm, objective, rounds=0, seed=3) -> Simulation:
    simulation = Simulation(algorithm, objective, hf.server(objective.nodes), seed=seed)
    for _ in range(rounds):
        simulation.step()
    return simulation


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
        for before, after in zip(at_optimum, simulation.state, strict=True):
            assert (before - after).abs().max() < 1e-13


def test_skipping_costs_accuracy_where_nodes_differ(reference):
    errors = []
    for skip in (0.25, 0.5, 0.9):
        path = reference.run(FedPD(eta=SAFE, solver="exact", skip=skip), 450)
        errors.append(float((path.mean(1) - reference.optimum).norm(dim=-1)[-250:].mean()))
    # An independent implementation with coins of its own: .046, .115, .57.
    assert errors == [pytest.approx(error, rel=0.3) for error in (0.046, 0.115, 0.57)]


@pytest.mark.parametrize("skip", [0.25, 0.5, 0.9])
def test_skipping_costs_nothing_where_nodes_are_alike(reference, skip):
    alike = Quadratics(reference.A[:1].expand(10, -1, -1), reference.b[:1].expand(10, -1))
    models = alike.run(FedPD(eta=0.3, solver="exact", skip=skip), 200)[-1]
    assert (models - reference.b[0]).norm(dim=-1).max() < 1e-10


# --- rounds without communication -----------------------------------------------------------------------


def communications(algorithm, objective, rounds, seed=3) -> list[int]:
    """The rounds in which something was sent; checks that they make all copies alike, and only they do."""
    simulation = simulate(algorithm, objective, seed=seed)
    found = []
    for round in range(rounds):
        before = simulation.traffic.numbers
        simulation.step()
        sent = simulation.traffic.numbers - before
        assert sent in (0, 2 * objective.nodes * objective.dim)
        alike = bool((simulation.models == simulation.models[0]).all())
        assert alike == (sent > 0)
        if sent:
            found.append(round)
    return found


@pytest.mark.parametrize("skip", [0.25, 0.9])
def test_the_shared_coin_decides(reference, skip):
    rounds = 200
    found = communications(FedPD(eta=0.1, lr=0.05, skip=skip), reference, rounds)
    assert found == [r for r in range(rounds) if not coin(3, r, 1, skip)]
    assert abs(len(found) - rounds * (1 - skip)) < 3 * math.sqrt(rounds * skip * (1 - skip))
    assert found != communications(FedPD(eta=0.1, lr=0.05, skip=skip), reference, rounds, seed=4)


def test_every_round_communicates_by_default(reference):
    assert communications(FedPD(eta=0.1, lr=0.05), reference, 5) == [0, 1, 2, 3, 4]


def test_periodic_communication(reference):
    assert communications(FedPD(eta=0.1, lr=0.05, communicate_every=3), reference, 10) == [2, 5, 8]


def test_a_falling_schedule_of_skips(reference):
    """p = (T - r)/T, as in the paper's code: about half of the rounds communicate, and most of them late."""
    rounds = 200
    found = communications(FedPD(eta=0.1, lr=0.05, skip=linear(1.0, rounds)), reference, rounds)
    assert found == [r for r in range(rounds) if not coin(3, r, 1, (rounds - r) / rounds)]
    assert abs(len(found) - rounds / 2) < 3 * math.sqrt(rounds / 6)  # variances p (1 - p) sum to T/6
    assert 0 not in found
    assert sum(r >= rounds / 2 for r in found) > 2 * sum(r < rounds / 2 for r in found)


def test_a_schedule_may_be_any_function_or_stand_in_a_configuration(reference):
    options = {"eta": 0.1, "lr": 0.05}
    plain = reference.run(FedPD(**options, skip=0.5), 20)
    for same in (
        lambda round: 0.5,
        constant(0.5),
        {"schedule": "linear", "start": 0.5, "rounds": 9, "end": 0.5},
    ):
        assert torch.equal(plain, reference.run(ALGORITHMS.build("fedpd", {**options, "skip": same}), 20))


def test_resuming_falls_into_the_same_coins():
    algorithm = FedPD(eta=0.1, solver="vr", local_steps=2, refresh_every=4, skip=0.5)
    objective = stochastic_digits()
    whole, half = simulate(algorithm, objective, 8), simulate(algorithm, objective, 3)
    resumed = simulate(algorithm, objective)
    resumed.restore(*half.snapshot())
    for _ in range(5):
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole.state), leaves(resumed.state), strict=True))
    assert (resumed.payload_bytes, resumed.work) == (whole.payload_bytes, whole.work)


# --- what the solvers cost ------------------------------------------------------------------------------


def test_a_node_that_is_done_stops_computing(reference):
    """Counted by hand: a node computes until its squared slope is within the tolerance."""
    eta, lr, tolerance = 0.3, 0.1, 1e-8
    simulation = simulate(FedPD(eta, "gd", lr, local_steps=200, tolerance=tolerance), reference, rounds=1)
    expected, ends = [], []
    for A, b in zip(reference.A, reference.b, strict=True):
        u, count = reference.x0, 1
        while (slope := A @ (u - b) + u / eta).square().sum() > tolerance:  # dual and common model are zero
            u, count = u - lr * slope, count + 1
        expected.append(count)
        ends.append(u)
    assert len(set(expected)) > 1
    assert simulation.work.gradient_evaluations == sum(expected)
    assert torch.allclose(simulation.state.x, torch.stack(ends), rtol=0, atol=1e-12)
    assert simulation.work.unfinished_solves == 0


def test_stopping_early_gives_the_same_answer_within_the_tolerance(reference):
    tolerance = 1e-6
    early = simulate(FedPD(0.3, "gd", 0.1, local_steps=500, tolerance=tolerance), reference, rounds=1)
    exact = simulate(FedPD(0.3, "exact"), reference, rounds=1)
    distance = (early.state.x - exact.state.x).norm(dim=-1).max()
    assert 1e-12 < distance <= math.sqrt(tolerance) / (MU + 1 / 0.3)
    late = simulate(FedPD(0.3, "gd", 0.1, local_steps=500), reference, rounds=1)
    assert late.work.gradient_evaluations == 500 * 10
    assert early.work.gradient_evaluations < 500 * 10 / 4


def test_solves_that_run_out_of_steps_are_reported(reference):
    simulation = simulate(FedPD(0.3, "gd", 0.1, local_steps=2, tolerance=1e-8), reference, rounds=1)
    assert simulation.work.unfinished_solves == 10
    assert simulation.work.gradient_evaluations == 2 * 10


def test_decreasing_steps():
    """f = x^2/2 from 1: step q = 1, 2, 3 of round r has size lr / sqrt(3 r / 5 + q)."""
    eta, lr = 0.5, 0.3
    algorithm = FedPD(eta, lr=lr, local_steps=3, decreasing=True)
    path = hf.minimize([lambda x: (x @ x) / 2], [1.0], algorithm, 4).x[:, 0, 0]
    x = common = 1.0
    dual = 0.0
    for round in range(4):
        for q in (1, 2, 3):
            x -= lr / math.sqrt(3 * round / 5 + q) * (x + dual + (x - common) / eta)
        dual += (x - common) / eta
        common = x + eta * dual
        assert path[round + 1] == pytest.approx(common, abs=1e-14)


def test_gd_reads_all_data_and_sgd_a_minibatch():
    objective = stochastic_digits()
    everything = int(objective.counts.sum())
    gd = simulate(FedPD(0.1, "gd", 0.05, local_steps=2), objective, rounds=3)
    assert gd.work.sample_gradients == 3 * 2 * everything
    sgd = simulate(FedPD(0.1, "sgd", 0.05, local_steps=2), objective, rounds=3)
    assert sgd.work.sample_gradients == 3 * 2 * 6 * 16


def test_vr_reads_all_data_every_so_many_rounds():
    """(M_i if r mod I == 0) + 2 Q B samples per node."""
    objective = stochastic_digits()
    simulation = simulate(FedPD(0.1, "vr", local_steps=3, refresh_every=2), objective)
    for round in range(5):
        before = simulation.work.sample_gradients
        simulation.step()
        refreshed = int(objective.counts.sum()) if round % 2 == 0 else 0
        assert simulation.work.sample_gradients - before == refreshed + 2 * 3 * 16 * 6


def test_variance_reduction_reduces_the_variance():
    """Near a point where it has seen the full gradient, g is far closer to the truth than a minibatch is."""
    objective = stochastic_digits()
    simulation = simulate(FedPD(0.05, "vr", local_steps=3), objective, rounds=1)
    x = simulation.state.x
    truth = objective.full_grads(x, torch.arange(6))
    minibatch = objective.minibatch_grads([x], torch.arange(6), 99, 0)[0]
    assert (simulation.state.g - truth).norm() < 0.3 * (minibatch - truth).norm()


@pytest.mark.parametrize(
    "algorithm",
    [
        FedPD(0.5, "gd", 0.3, local_steps=3),
        FedPD(0.5, "sgd", 0.3, local_steps=3),
        FedPD(0.5, "sgd", 1.0, local_steps=3, decreasing=True),
        FedPD(0.5, "vr", local_steps=3, refresh_every=10),
    ],
)
def test_it_learns_digits(algorithm):
    objective = stochastic_digits()
    simulation = simulate(algorithm, objective, rounds=40)
    assert objective.global_value(simulation.models.mean(0)) < 0.4 * objective.global_value(objective.x0)


def test_only_variance_reduction_keeps_a_gradient(reference):
    assert simulate(FedPD(0.1, "exact"), reference).state._fields == ("x", "common", "dual")
    assert simulate(FedPD(0.1, "vr"), reference).state._fields == ("x", "common", "dual", "g")


@pytest.mark.parametrize(
    "solver", [{"solver": "exact"}, {"solver": "gd", "lr": 0.1}, {"lr": 0.1}, {"solver": "vr"}]
)
def test_a_round_makes_a_new_state_of_the_same_shapes_and_types(solver):
    objective = FunctionObjective([lambda x: (x @ x) / 2, lambda x: (x - 1) @ (x - 1)], torch.ones(3))
    simulation = simulate(FedPD(eta=0.1, communicate_every=2, **solver), objective)
    for _ in range(3):
        state = simulation.state
        before = [tensor.clone() for tensor in leaves(state)]
        simulation.step()
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))
        for tensor in leaves(simulation.state):
            assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float32)


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
        reference.run(FedPD(eta=0.1, lr=0.05), 1, cohort_size=3)
