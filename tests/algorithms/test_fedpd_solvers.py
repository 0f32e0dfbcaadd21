"""FedPD's local solvers: the steps they take, the data they read, the state they keep."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import MU, reference_quadratics
from server_runs import simulate, stochastic_digits

import holdfast as hf
from holdfast.algorithms.fedpd import FedPD
from holdfast.core.tree import leaves, named_leaves
from holdfast.problem.problem import FunctionProblem


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


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
    problem = stochastic_digits()
    everything = int(problem.source.counts.sum())
    gd = simulate(FedPD(0.1, "gd", 0.05, local_steps=2), problem, rounds=3)
    assert gd.work.sample_gradients == 3 * 2 * everything
    sgd = simulate(FedPD(0.1, "sgd", 0.05, local_steps=2), problem, rounds=3)
    assert sgd.work.sample_gradients == 3 * 2 * 6 * 16


def test_vr_reads_all_data_every_so_many_rounds():
    """(M_i if r mod I == 0) + 2 Q B samples per node."""
    problem = stochastic_digits()
    simulation = simulate(FedPD(0.1, "vr", local_steps=3, refresh_every=2), problem)
    for round in range(5):
        before = simulation.work.sample_gradients
        simulation.step()
        refreshed = int(problem.source.counts.sum()) if round % 2 == 0 else 0
        assert simulation.work.sample_gradients - before == refreshed + 2 * 3 * 16 * 6


def test_variance_reduction_reduces_the_variance():
    """Near a point where it has seen the full gradient, g is far closer to the truth than a minibatch is."""
    problem = stochastic_digits()
    simulation = simulate(FedPD(0.05, "vr", local_steps=3), problem, rounds=1)
    x = simulation.state.x
    truth = problem.full_grads(x, torch.arange(6))
    minibatch = problem.minibatch_values_and_grads([x], torch.arange(6), 99, 0)[0][1]
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
    problem = stochastic_digits()
    simulation = simulate(algorithm, problem, rounds=40)
    assert problem.global_value(simulation.models.mean(0)) < 0.4 * problem.global_value(problem.x0)


def test_only_variance_reduction_keeps_a_gradient(reference):
    def kept(solver: str) -> list[str]:
        return [name for name, _ in named_leaves(simulate(FedPD(0.1, solver), reference).state)]

    assert kept("exact") == ["x", "common", "dual"]
    assert kept("vr") == ["x", "common", "dual", "g"]


@pytest.mark.parametrize(
    "solver", [{"solver": "exact"}, {"solver": "gd", "lr": 0.1}, {"lr": 0.1}, {"solver": "vr"}]
)
def test_a_round_makes_a_new_state_of_the_same_shapes_and_types(solver):
    problem = FunctionProblem([lambda x: (x @ x) / 2, lambda x: (x - 1) @ (x - 1)], torch.ones(3))
    simulation = simulate(FedPD(eta=0.1, communicate_every=2, **solver), problem)
    for _ in range(3):
        state = simulation.state
        before = [tensor.clone() for tensor in leaves(state)]
        simulation.step()
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))
        for tensor in leaves(simulation.state):
            assert (tensor.shape, tensor.dtype) == ((2, 3), torch.float32)
