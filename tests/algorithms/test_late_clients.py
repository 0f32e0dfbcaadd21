"""Clients that are left out of rounds, by a recorded pattern: duals stay sound, the limit the optimum."""

from __future__ import annotations

import pytest
import torch
from conftest import make_quadratics
from linear_rounds import limit

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.engines.common.simulation import Simulation

PATTERN = [[0, 1, 2, 3], [0, 1], [0, 2], [0, 1, 2], [0]]  # client 3 answers in time once in five rounds

ALLOWED = [
    (hf.SCAFFOLD(lr=0.05, local_steps=4), lambda server: server.c, lambda s: s.c),
    (hf.SCAFFOLD(lr=0.05, local_steps=[1, 2, 5, 8], option=1), lambda server: server.c, lambda s: s.c),
    (hf.FedDyn(alpha=1.0, lr=0.1, local_steps=5), lambda server: server.h, lambda s: s.g),
    (hf.FedDyn(alpha=1.0, solver="exact"), lambda server: server.h, lambda s: s.g),
    (hf.FedDR(eta=1.0), lambda server: server.x, lambda s: 2 * s.x - s.y),
    (hf.FiveGCS(lr=0.5, mu=0.5), lambda server: server.v, lambda s: s.u),
]


@pytest.fixture(scope="module")
def four():
    return make_quadratics(4, dim=2, L=2.0)


def ident(value: object) -> str | None:
    return str(value) if isinstance(value, hf.ServerAlgorithm) else ""


@pytest.mark.parametrize(("method", "of_server", "of_clients"), ALLOWED, ids=ident)
def test_the_servers_dual_stays_the_mean_of_the_clients_and_the_limit_the_optimum(
    four, method, of_server, of_clients
):
    simulation = Simulation(method, four, hf.server(4), cohort=PATTERN * 2)
    for chosen in PATTERN * 2:
        before = of_clients(simulation.state.clients).clone()
        simulation.step()
        after = of_clients(simulation.state.clients)
        assert (of_server(simulation.state.server) - after.mean(0)).abs().max() < 1e-13
        moved = (after - before).abs().amax(1) > 0
        assert moved.nonzero().flatten().tolist() == chosen
    models = limit(four, method, cycle=len(PATTERN), doublings=10, cohort=PATTERN)
    assert (models - four.optimum).abs().max() < 1e-10


def test_every_method_that_declares_it_is_tested():
    declared = {ALGORITHMS[name] for name in ALGORITHMS if ALGORITHMS[name].declared.late_clients}
    assert declared == {type(method) for method, *_ in ALLOWED}, (
        "ALLOWED has a line for every method that declares late_clients: the method, its server's dual, "
        "and the clients' terms whose mean that is"
    )


def test_fedavg_leans_towards_those_who_are_never_late(four):
    """Even with one step, where it has no drift: this is why it does not declare it."""
    models = limit(four, hf.FedAvg(lr=0.1), cycle=len(PATTERN), cohort=PATTERN)
    assert (models - four.optimum).norm() > 0.3
    towards_first = (models[0] - four.b[0]).norm() < (four.optimum - four.b[0]).norm()
    assert towards_first


def test_recorded_cohorts_are_those_that_were_drawn(four):
    drawn = Simulation(hf.SCAFFOLD(lr=0.05), four, hf.server(4), seed=5, cohort=2)
    cohorts = [drawn.rounds.clients_asked(r) for r in range(4)]
    again = Simulation(hf.SCAFFOLD(lr=0.05), four, hf.server(4), seed=5, cohort=cohorts)
    for _ in range(4):
        drawn.step()
        again.step()
    assert torch.equal(drawn.models, again.models)
    assert drawn.payload_bytes == again.payload_bytes
    with pytest.raises(hf.HoldfastError, match="recorded for 4 rounds"):
        again.step()


@pytest.mark.parametrize("bad", [[[0], []], [[0, 0]], [[4]]])
def test_cohorts_that_cannot_be_are_refused(four, bad):
    with pytest.raises(hf.HoldfastError, match="expected different nodes below 4"):
        Simulation(hf.SCAFFOLD(lr=0.05), four, hf.server(4), cohort=bad)
