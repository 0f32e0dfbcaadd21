"""FedPD that skips communication: when it does, and what it costs."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import Quadratics
from linear_rounds import L, reference_quadratics
from server_runs import simulate, stochastic_digits

from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.fedpd import FedPD
from holdfast.contract.parameters import constant, linear
from holdfast.core.randomness import coin
from holdfast.core.tree import leaves

SAFE = 0.9 * (math.sqrt(5) - 1) / (4 * L)  # nine tenths of the largest eta that Theorem 1 allows


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


def communications(algorithm, problem, rounds, seed=3) -> list[int]:
    """The rounds in which something was sent; checks that they make all copies alike, and only they do."""
    simulation = simulate(algorithm, problem, seed=seed)
    found = []
    for round in range(rounds):
        before = simulation.traffic.numbers
        simulation.step()
        sent = simulation.traffic.numbers - before
        assert sent in (0, 2 * problem.nodes * problem.dim)
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
    problem = stochastic_digits()
    whole, half = simulate(algorithm, problem, 8), simulate(algorithm, problem, 3)
    resumed = simulate(algorithm, problem)
    resumed.restore(*half.snapshot())
    for _ in range(5):
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole.state), leaves(resumed.state), strict=True))
    assert (resumed.payload_bytes, resumed.work) == (whole.payload_bytes, whole.work)


@pytest.mark.slow
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
