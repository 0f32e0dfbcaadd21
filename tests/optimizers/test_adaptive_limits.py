"""Where methods end with AdamW and with weight decay, on heterogeneous quadratics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import Quadratics
from linear_rounds import reference_quadratics
from torch import Tensor

import holdfast as hf
from holdfast.engines.common.simulation import Simulation

pytestmark = pytest.mark.slow  # minutes in all; they say where methods end

RING, SERVER = hf.Network.of(hf.ring(10)), hf.server(10)
ADAM = hf.AdamW(weight_decay=0.0, keep=True)
SOFT = hf.AdamW(weight_decay=0.0, eps=1.0, keep=True)


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=4)


def away(problem: Quadratics, algorithm, network, rounds: int) -> float:
    """The largest distance of a node from the optimum at the end."""
    models = problem.run(algorithm, rounds, network)[-1]
    return float((models - problem.optimum).norm(dim=-1).max())


@pytest.mark.parametrize("unit", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("method", [hf.SCAFFOLD, hf.FedLin, hf.VRLSGD, hf.LocalGECLServer])
def test_with_a_server_corrected_methods_reach_the_optimum_with_adam(reference, method, unit):
    """Whatever the unit of the loss: learned from Adam's directions, corrections would depend on it."""
    problem = Quadratics(unit * reference.A, reference.b)
    assert away(problem, method(lr=0.02, local_steps=10, optimizer=ADAM), SERVER, 150) < 1e-12


def test_scaffnew_reaches_it_too(reference):
    problem = Quadratics(0.01 * reference.A, reference.b)
    assert away(problem, hf.Scaffnew(lr=0.02, p=0.2, optimizer=ADAM), SERVER, 250) < 1e-12


@pytest.mark.parametrize(("method", "network"), [(hf.FedAvg, SERVER), (hf.Gossip, RING)])
def test_uncorrected_methods_stall_with_adam(reference, method, network):
    for optimizer in (ADAM, SOFT):
        assert away(reference, method(lr=0.02, local_steps=10, optimizer=optimizer), network, 400) > 0.5


@pytest.mark.parametrize("method", [hf.LocalGECL, hf.KGT, hf.DSCAFFOLD, hf.NETFLEET])
def test_between_neighbours_they_reach_it_where_eps_is_as_large_as_gradients(reference, method):
    assert away(reference, method(lr=0.02, local_steps=5, optimizer=SOFT), RING, 700) < 1e-9


@pytest.mark.parametrize("method", [hf.GECL, hf.GTSGD])
def test_so_do_methods_with_one_step_per_exchange(reference, method):
    assert away(reference, method(lr=0.02, optimizer=SOFT), RING, 1200) < 1e-12


def test_between_neighbours_a_small_eps_needs_steps_that_fall(reference):
    """Steps of Adam do not shrink with the gradient, so neighbours that disagree keep each other moving."""
    constant = away(reference, hf.LocalGECL(lr=0.01, local_steps=10, optimizer=ADAM), RING, 600)
    cosine = hf.WarmupCosine(warmup=50, steps=6000, inner=ADAM)
    falling = away(reference, hf.LocalGECL(lr=0.01, local_steps=10, optimizer=cosine), RING, 600)
    assert 1e-4 < constant < 1e-2
    assert falling < 1e-5


@pytest.mark.parametrize(("method", "far"), [(hf.FedPD, {"eta": 1.0}), (hf.FedDyn, {"alpha": 10.0})])
def test_those_that_learn_from_models_reach_it_with_a_strong_pull(reference, method, far):
    cosine = hf.WarmupCosine(warmup=50, steps=4000, inner=ADAM)
    assert away(reference, method(**far, lr=0.02, local_steps=10, optimizer=cosine), SERVER, 400) < 1e-5


LOCAL_PROBLEMS = [
    (hf.FedPD(eta=1.0, lr=0.05, local_steps=5), SERVER),
    (hf.FedDyn(alpha=1.0, lr=0.05, local_steps=5), SERVER),
    (hf.ECL(lr=0.02, local_steps=5), RING),
]


@pytest.mark.parametrize(("algorithm", "network"), LOCAL_PROBLEMS, ids=["fedpd", "feddyn", "ecl"])
def test_where_every_round_has_another_local_problem_momentum_begins_anew(reference, algorithm, network):
    for optimizer in (hf.Momentum(), hf.Clip(2.0)):
        assert away(reference, replace(algorithm, optimizer=optimizer), network, 900) < 1e-9
    assert away(reference, replace(algorithm, optimizer=hf.Momentum(keep=True)), network, 900) > 100


def common_gradient(problem: Quadratics, x: Tensor) -> Tensor:
    return problem.grads(x.expand(problem.nodes, -1)).mean(0)


@pytest.mark.parametrize(("method", "network"), [(hf.SCAFFOLD, SERVER), (hf.LocalGECL, RING)])
def test_adamws_weight_decay_moves_the_limit_to_that_of_adamw_alone(reference, method, network):
    """Where a single AdamW on the mean of all functions would stop: g / (|g| + eps) + weight_decay x = 0."""
    optimizer = hf.AdamW(weight_decay=0.2, eps=1.0, beta2=0.99, keep=True)
    models = reference.run(method(lr=0.02, local_steps=5, optimizer=optimizer), 800, network)[-1]
    x = models[0]
    g = common_gradient(reference, x)
    assert (models - x).abs().max() < 1e-9
    assert (g / (g.abs() + 1.0) + 0.2 * x).abs().max() < 1e-9
    assert (x - reference.optimum).norm() > 0.1


@pytest.mark.parametrize("optimizer", [hf.SGD(weight_decay=0.3), hf.Momentum(weight_decay=0.3, keep=True)])
@pytest.mark.parametrize(("method", "network"), [(hf.SCAFFOLD, SERVER), (hf.LocalGECL, RING)])
def test_weight_decay_of_sgd_is_an_l2_term(reference, method, network, optimizer):
    models = reference.run(method(lr=0.02, local_steps=5, optimizer=optimizer), 900, network)[-1]
    x = models[0]
    assert (models - x).abs().max() < 1e-9
    assert (common_gradient(reference, x) + 0.3 * x).abs().max() < 1e-9
    assert (x - reference.optimum).norm() > 0.1


def test_clipping_does_not_move_the_limit(reference):
    """Corrections learn from gradients before they are clipped, so the optimum stays where nothing moves."""
    for method, network in ((hf.SCAFFOLD, SERVER), (hf.LocalGECL, RING)):
        algorithm = method(lr=0.02, local_steps=5, optimizer=hf.Clip(2.0))
        assert away(reference, algorithm, network, 900) < 1e-9


def test_a_node_that_does_not_compute_keeps_its_place_and_memory(reference):
    never = hf.Network.of(hf.ring(10)).sporadic(torch.linspace(0.05, 1, 10).tolist(), 1.0, seed=0)
    simulation = Simulation(hf.DSpodFL(lr=0.01, optimizer=ADAM), reference, never, seed=3)
    rounds = 40
    for _ in range(rounds):
        simulation.step()
    taken = simulation.state.memory.t[:, 0]
    assert taken.max() == rounds  # the last node always computes
    assert taken.min() < 0.3 * rounds
    assert simulation.work.gradient_evaluations == taken.sum()
