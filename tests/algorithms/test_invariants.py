"""What must hold after every round, with stochastic gradients too."""

from __future__ import annotations

import pytest
import torch
from server_runs import stochastic_digits

import holdfast as hf
from holdfast.core.tree import leaves
from holdfast.engines.common.simulation import Simulation
from holdfast.problem.problem import FunctionProblem


def exact_quadratics(quadratics) -> FunctionProblem:
    return FunctionProblem(quadratics.functions, quadratics.x0)


@pytest.fixture(params=["stochastic digits", "exact quadratics"])
def problem(request, quadratics):
    return stochastic_digits() if request.param.startswith("stochastic") else exact_quadratics(quadratics)


@pytest.mark.parametrize(
    "algorithm",
    [
        hf.GECL(lr=0.02, alpha=1.0),
        hf.LocalGECL(lr=0.01, local_steps=4),
        hf.LocalGECL(lr=0.01, local_steps=4, alpha=2.0, warm_start_rounds=3),
    ],
    ids=str,
)
def test_duals_sum_to_zero(problem, algorithm):
    simulation = Simulation(algorithm, problem, hf.Network.of(hf.erdos_renyi(problem.nodes, p=0.6, seed=1)))
    for _ in range(20):
        simulation.step()
        dual = simulation.state.dual
        assert dual.sum(0).abs().max() <= 1e-12 * dual.abs().max() * problem.nodes
    assert dual.abs().max() > 1e-3


def test_server_duals_sum_to_zero(problem):
    simulation = Simulation(hf.LocalGECLServer(lr=0.01, local_steps=4), problem, hf.server(problem.nodes))
    for _ in range(20):
        simulation.step()
        dual = simulation.state.dual
        assert dual.sum(0).abs().max() <= 1e-12 * dual.abs().max() * problem.nodes


@pytest.mark.parametrize("cohort", [None, 3])
def test_scaffold_server_variate_is_the_mean_of_all_clients(problem, cohort):
    algorithm = hf.SCAFFOLD(lr=0.01, local_steps=4)
    simulation = Simulation(algorithm, problem, hf.server(problem.nodes), seed=5, cohort=cohort or "all")
    for _ in range(20):
        simulation.step()
        server, clients = simulation.state
        assert torch.allclose(server.c, clients.c.mean(0), rtol=0, atol=1e-13)
    assert server.c.abs().max() > 1e-4


def test_tracking_dscaffold_keeps_the_mean_of_its_control_variates(problem):
    simulation = Simulation(
        hf.DSCAFFOLD(lr=0.01, local_steps=4), problem, hf.Network.of(hf.ring(problem.nodes))
    )
    for _ in range(20):
        simulation.step()
        assert torch.allclose(simulation.state.c.mean(0), simulation.state.c_mean.mean(0), rtol=0, atol=1e-12)


def test_the_optimum_is_a_fixed_point(quadratics):
    """x = x*, dual = own gradient at x*: nothing moves."""
    simulation = Simulation(
        hf.LocalGECL(lr=0.01, local_steps=5, alpha=1.0),
        exact_quadratics(quadratics),
        hf.Network.of(hf.ring(10)),
    )
    star = quadratics.optimum.expand(10, -1)
    at_optimum = simulation.state._replace(x=star, mixed=star, dual=quadratics.grads(star))
    simulation.state = at_optimum
    simulation.step()
    for before, after in zip(leaves(at_optimum), leaves(simulation.state), strict=True):
        assert (before - after).abs().max() < 1e-13


def test_warm_start_shrinks_the_initial_dual_error(quadratics):
    """E^(0) falls at least by lambda^(2 rounds)."""
    network = hf.Network.of(hf.ring(10))
    problem = exact_quadratics(quadratics)
    gradients = quadratics.grads(quadratics.x0.expand(10, -1))
    deviation = gradients - gradients.mean(0)

    def error(rounds: int) -> float:
        algorithm = hf.LocalGECL(lr=0.01, local_steps=1, warm_start_rounds=rounds)
        dual = Simulation(algorithm, problem, network).state.dual
        return float((deviation - dual).square().sum(-1).mean())

    assert error(20) <= network.spectral_lambda**40 * error(0) * (1 + 1e-9)
    assert error(20) > 0
