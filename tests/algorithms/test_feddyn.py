"""FedDyn: invariants, fixed point, rates, and a plain loop that it must agree with, cohorts included."""

from __future__ import annotations

import pytest
import torch
from conftest import Quadratics
from linear_rounds import contraction, measured_decay, reference_quadratics
from server_runs import assert_same, simulate, stochastic_digits

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.feddyn import FedDyn
from holdfast.contract.parameters import halving
from holdfast.core.randomness import cohort

ALPHA = 1 / 0.3


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (FedDyn(alpha=ALPHA, solver="exact"), "quadratics"),
        (FedDyn(alpha=ALPHA, solver="gd", lr=0.1, local_steps=4), "quadratics"),
        (FedDyn(alpha=halving(4.0, every=3), lr=0.1, local_steps=4), "quadratics"),
        (FedDyn(alpha=0.1, lr=0.1, local_steps=4), "digits"),
    ],
)
def test_the_servers_h_is_the_mean_of_all_clients(algorithm, problem, size, reference):
    simulation = simulate(
        algorithm, reference if problem == "quadratics" else stochastic_digits(), cohort=size
    )
    for _ in range(12):
        simulation.step()
        server, clients = simulation.state
        assert (server.h - clients.g.mean(0)).abs().max() <= 1e-13 * clients.g.abs().max()
    assert server.h.abs().max() > 1e-4


@pytest.mark.parametrize("size", [None, 3])
def test_the_optimum_is_a_fixed_point(reference, size):
    for solver in ({"solver": "exact"}, {"lr": 0.1, "local_steps": 3}):
        simulation = simulate(FedDyn(alpha=ALPHA, **solver), reference, cohort=size)
        star = reference.optimum
        server, clients = simulation.state
        g = reference.grads(star.expand(10, -1))
        simulation.state = simulation.state._replace(
            server=server._replace(x=star), clients=clients._replace(g=g.clone())
        )
        simulation.step()
        server, clients = simulation.state
        assert (server.x - star).abs().max() < 1e-13
        assert server.h.abs().max() < 1e-13
        assert (clients.g - g).abs().max() < 1e-13


def test_it_reaches_the_optimum_at_the_known_rate(reference):
    algorithm = FedDyn(alpha=ALPHA, solver="exact")
    path = reference.run(algorithm, 100)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(reference, path) == pytest.approx(0.626, abs=0.005)
    radius, conserved = contraction(reference, algorithm)
    assert radius == pytest.approx(0.627, abs=0.001)
    assert conserved == reference.dim  # h minus the mean of the clients' g


@pytest.mark.parametrize("local_steps", [1, 5])
def test_inexact_solves_reach_the_optimum_too(reference, local_steps):
    algorithm = FedDyn(alpha=ALPHA, solver="gd", lr=0.1, local_steps=local_steps)
    assert (reference.run(algorithm, 250)[-1] - reference.optimum).norm(dim=-1).max() < 1e-10


@pytest.mark.parametrize("size", [10, 3])
def test_it_does_what_a_plain_loop_over_the_clients_does(reference, size):
    """Client by client, with theta_i = argmin f_i - <g_i, .> + (alpha/2) ||. - theta||^2 in closed form."""
    path = reference.run(FedDyn(alpha=ALPHA, solver="exact"), 30, cohort=size or "all")[:, 0]
    theta, h, g = reference.x0, reference.x0, torch.zeros(10, 6, dtype=torch.float64)
    eye = torch.eye(6, dtype=torch.float64)
    plain = [theta]
    for round in range(30):
        mine = []
        for i in cohort(3, round, 10, size).tolist():
            A, b = reference.A[i], reference.b[i]
            mine.append(torch.linalg.solve(A + ALPHA * eye, A @ b + g[i] + ALPHA * theta))
            g[i] = g[i] - ALPHA * (mine[-1] - theta)
        h = h - ALPHA / 10 * sum(x - theta for x in mine)
        theta = sum(mine) / size - h / ALPHA
        plain.append(theta)
    assert_same(path, torch.stack(plain))


def test_full_gradients_and_minibatches():
    objective = stochastic_digits()
    gd = simulate(FedDyn(0.1, "gd", 0.05, local_steps=2), objective, rounds=3)
    assert gd.work.sample_gradients == 3 * 2 * int(objective.source.counts.sum())
    sgd = simulate(FedDyn(0.1, "sgd", 0.05, local_steps=2), objective, rounds=3)
    assert sgd.work.sample_gradients == 3 * 2 * 6 * 16
    assert sgd.traffic.numbers == 3 * 2 * 6 * objective.dim  # one vector down, one up


@pytest.mark.parametrize("size", [None, 3])
def test_it_learns_digits(size):
    objective = stochastic_digits()
    simulation = simulate(FedDyn(alpha=0.5, lr=0.3, local_steps=4), objective, rounds=40, cohort=size)
    assert objective.global_value(simulation.models[0]) < 0.4 * objective.global_value(objective.x0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.1}, r"FedDyn.lr: the solver 'sgd' needs a step size; give lr"),
        (
            {"alpha": 0.1, "solver": "exact", "lr": 0.1},
            r"FedDyn.lr: the solver 'exact' does not use it, got 0.1",
        ),
        ({"alpha": 0.1, "solver": "exact", "local_steps": 3}, r"FedDyn.local_steps: .* 'gd' or 'sgd'$"),
        ({"alpha": 0.0, "lr": 0.1}, r"alpha: should be greater than 0, got 0"),
        ({"alpha": 0.1, "solver": "vr"}, r"solver: should be 'exact', 'gd' or 'sgd', got 'vr'"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(hf.HoldfastError, match=message):
        FedDyn(**options)
    with pytest.raises(hf.HoldfastError, match=message):
        ALGORITHMS.build("feddyn", options)


def test_a_graph_is_refused(reference):
    with pytest.raises(hf.HoldfastError, match=r"FedDyn needs a server"):
        reference.run(FedDyn(alpha=0.1, lr=0.1), 1, hf.ring(10))
