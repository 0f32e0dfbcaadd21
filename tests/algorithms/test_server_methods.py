"""VRL-SGD, FedLin and SCAFFOLD's option I: equivalences, invariants and rates."""

from __future__ import annotations

import pytest
import torch
from conftest import Quadratics
from linear_rounds import contraction, measured_decay, reference_quadratics
from server_runs import assert_same, stochastic_digits

import holdfast as hf
from holdfast.algorithms import VRLSGD, FedLin
from holdfast.algorithms.fedavg import FedProx
from holdfast.algorithms.scaffold import Client
from holdfast.engines.common.rounds import ServerState
from holdfast.engines.common.simulation import Simulation

ROUNDS, LR, K = 40, 0.02, 5


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=6)


@pytest.fixture(scope="module", params=["exact", "stochastic"])
def objective(request, reference):
    return reference if request.param == "exact" else stochastic_digits()


def test_vrl_sgd_is_scaffold_for_half_the_traffic(objective):
    """With the same minibatches the same models, and delta_i = c_i - c."""
    server = hf.server(objective.nodes)
    vrl = Simulation(VRLSGD(lr=LR, local_steps=K), objective, server)
    scaffold = Simulation(hf.SCAFFOLD(lr=LR, local_steps=K), objective, server)
    for _ in range(ROUNDS):
        vrl.step()
        scaffold.step()
        assert_same(vrl.models, scaffold.models)
        assert_same(vrl.state.delta, scaffold.state.clients.c - scaffold.state.server.c)
        assert 2 * vrl.payload_bytes == scaffold.payload_bytes


def test_vrl_sgd_deviations_sum_to_zero(objective):
    simulation = Simulation(VRLSGD(lr=LR, local_steps=K), objective, hf.server(objective.nodes))
    for _ in range(20):
        simulation.step()
        delta = simulation.state.delta
        assert delta.sum(0).abs().max() <= 1e-12 * delta.abs().max() * objective.nodes
    assert delta.abs().max() > 1e-3


def test_fedlin_is_scaffold_option_1_whose_variates_are_fresh(objective):
    """SCAFFOLD's variates are a round old, those that FedLin fetches in its first exchange are not.

    Renewed before every round they lead to the same steps; as they are they do not.
    """
    server, everybody = hf.server(objective.nodes), torch.arange(objective.nodes)
    fedlin = Simulation(FedLin(lr=LR, local_steps=K), objective, server)
    fresh, plain = (
        Simulation(hf.SCAFFOLD(lr=LR, local_steps=K, option=1), objective, server) for _ in range(2)
    )
    for _ in range(ROUNDS):
        own = objective.full_grads(fresh.models.contiguous(), everybody)
        fresh.state = ServerState(fresh.state.server._replace(c=own.mean(0)), Client(c=own))
        for simulation in (fedlin, fresh, plain):
            simulation.step()
        assert_same(fedlin.models, fresh.models)
        assert (fedlin.models - plain.models).abs().max() > 1e-6


@pytest.mark.parametrize(
    "algorithm", [FedLin(lr=LR, local_steps=K), hf.SCAFFOLD(lr=LR, local_steps=K, option=1)], ids=str
)
def test_one_gradient_of_a_round_reads_all_data(objective, algorithm):
    simulation = Simulation(algorithm, objective, hf.server(objective.nodes))
    simulation.step()
    everybody = torch.arange(objective.nodes)
    minibatches = K * objective.samples_per_minibatch(everybody)
    assert simulation.work.sample_gradients == minibatches + objective.samples(everybody)


def test_option_1_variates_are_the_full_gradients_at_the_servers_last_model(objective):
    simulation = Simulation(
        hf.SCAFFOLD(lr=LR, local_steps=K, option=1), objective, hf.server(objective.nodes)
    )
    for _ in range(5):
        before = simulation.models.clone()
        simulation.step()
        server, clients = simulation.state
        everybody = torch.arange(objective.nodes)
        torch.testing.assert_close(clients.c, objective.full_grads(before, everybody), rtol=0, atol=1e-12)
        assert torch.allclose(server.c, clients.c.mean(0), rtol=0, atol=1e-12)


def test_option_1_keeps_the_mean_variate_when_clients_are_sampled(objective):
    algorithm = hf.SCAFFOLD(lr=LR, local_steps=K, option=1)
    simulation = Simulation(algorithm, objective, hf.server(objective.nodes), seed=5, cohort=3)
    for _ in range(20):
        simulation.step()
        server, clients = simulation.state
        assert torch.allclose(server.c, clients.c.mean(0), rtol=0, atol=1e-12)
    assert server.c.abs().max() > 1e-4


@pytest.mark.parametrize("algorithm", [FedLin(lr=0.1), hf.SCAFFOLD(lr=0.1, option=1)], ids=str)
def test_one_fresh_local_step_is_gradient_descent(reference, algorithm):
    """One step needs no correction: the corrections cancel in the mean."""
    assert_same(reference.run(algorithm, ROUNDS), reference.run(hf.FedAvg(lr=0.1, local_steps=1), ROUNDS))


KNOWN = [  # the algorithm, fitted factor per round, spectral radius: an independent implementation's
    (VRLSGD(lr=0.02, local_steps=10), 0.707, 0.715),
    (FedLin(lr=0.05, local_steps=10), 0.404, 0.418),
    (hf.SCAFFOLD(lr=0.02, local_steps=10), 0.707, 0.715),
    (hf.SCAFFOLD(lr=0.01, local_steps=10, server_lr=2.0), 0.691, 0.702),
    (hf.LocalGECLServer(lr=0.02, local_steps=10), 0.704, 0.712),
]


@pytest.mark.parametrize(("algorithm", "factor", "radius"), KNOWN, ids=str)
def test_they_reach_the_optimum_at_the_known_rate(reference, algorithm, factor, radius):
    path = reference.run(algorithm, 120)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(reference, path) == pytest.approx(factor, abs=0.005)
    assert contraction(reference, algorithm)[0] == pytest.approx(radius, abs=0.001)


def test_option_1_reaches_the_optimum_as_fast_as_its_matrix_says(reference):
    algorithm = hf.SCAFFOLD(lr=0.02, local_steps=10, option=1)
    path = reference.run(algorithm, 120)
    assert (path[-1] - reference.optimum).norm(dim=-1).max() < 1e-10
    radius, conserved = contraction(reference, algorithm)
    assert measured_decay(reference, path) == pytest.approx(radius, abs=0.01)
    assert conserved == reference.dim  # mean of the clients' variates minus the server's


def test_the_reference_problem_shows_the_known_drift_of_fedavg(reference):
    """The draw is the one that the known rates were measured on: three biases agree in all digits."""
    for lr, server_lr, bias in ((0.1, 1.0, 0.815), (0.01, 1.0, 0.099), (0.002, 5.0, 0.0197)):
        algorithm = hf.FedAvg(lr=lr, local_steps=10, server_lr=server_lr)
        model = reference.run(algorithm, 300)[-1, 0]
        assert (model - reference.optimum).norm() == pytest.approx(bias, rel=0.005)


@pytest.mark.parametrize("algorithm", [VRLSGD(lr=0.1), FedLin(lr=0.1)], ids=str)
def test_a_graph_is_refused(reference, algorithm):
    with pytest.raises(hf.HoldfastError, match=r"needs a server: use the topology 'server', not a graph"):
        reference.run(algorithm, 1, hf.ring(10))


def test_an_unknown_option_is_refused():
    with pytest.raises(hf.HoldfastError, match=r"SCAFFOLD.option: should be 1 or 2, got 3"):
        hf.SCAFFOLD(lr=0.1, option=3)


def test_reduced_fedprox_on_full_gradients_is_fedprox(reference):
    """Differences of exact gradients add up to the gradient itself."""
    plain, reduced = (FedProx(lr=0.05, local_steps=6, rho=0.3, reduced=reduced) for reduced in (False, True))
    assert_same(reference.run(plain, 30), reference.run(reduced, 30))


class OneDifferenceMore(FedProx):
    """SARAH with a difference of gradients after the last step too, which nothing reads."""

    def client(self, s, received, oracle):
        x, gradient = received, oracle.full_grad(received)
        for _ in range(self.local_steps):
            new = x - self.lr * (gradient + self.rho * (x - received))
            there, here = oracle.grads(new, x)
            x, gradient = new, gradient + there - here
        return s, x - received


def test_reduced_fedprox_computes_no_gradient_that_it_does_not_use():
    problem = stochastic_digits()
    kinds = (FedProx, OneDifferenceMore)
    lean, wasteful = (
        Simulation(kind(lr=0.01, local_steps=K, reduced=True), problem, hf.server(problem.nodes), seed=3)
        for kind in kinds
    )
    for _ in range(5):
        lean.step()
        wasteful.step()
    assert torch.equal(lean.models, wasteful.models)
    assert lean.work.gradient_evaluations == 5 * (2 * K - 1) * problem.nodes
    assert wasteful.work.gradient_evaluations == 5 * (2 * K + 1) * problem.nodes


def test_reduced_fedprox_reads_all_data_once_a_round_and_two_minibatches_a_later_step():
    problem = stochastic_digits()
    simulation = Simulation(FedProx(lr=0.01, local_steps=3, reduced=True), problem, hf.server(problem.nodes))
    simulation.step()
    everybody = torch.arange(problem.nodes)
    expected = problem.samples(everybody) + 2 * 2 * problem.samples_per_minibatch(everybody)
    assert simulation.work.sample_gradients == expected
