"""Gradient tracking with and without local steps, and PD-SGDM: equivalences and invariants."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import Quadratics
from linear_rounds import reference_quadratics
from server_runs import assert_same, stochastic_digits

import holdfast as hf
from holdfast.algorithms import DSGT, GTSGD, KGT, NETFLEET, PDSGDM
from holdfast.engines.common.simulation import Simulation

RING = hf.Network.of(hf.ring(10))
COMPLETE = hf.Network.of(hf.complete(10))


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=4)


@pytest.fixture(scope="module", params=["exact", "stochastic"])
def problem(request, reference):
    return reference if request.param == "exact" else stochastic_digits()


def ring(problem) -> hf.Network:
    return hf.Network.of(hf.ring(problem.nodes))


def states(problem, algorithm, network, rounds: int = 40) -> list:
    """The state before every round and after the last."""
    simulation = Simulation(algorithm, problem, network)
    visited = [simulation.state]
    for _ in range(rounds):
        simulation.step()
        visited.append(simulation.state)
    return visited


def stacked(visited: list, field: str) -> torch.Tensor:
    return torch.stack([getattr(state, field) for state in visited])


# --- the same method by another name ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm", [NETFLEET(lr=0.03, local_steps=1), DSGT(lr=0.03, local_steps=0)], ids=str
)
def test_one_step_between_exchanges_is_gradient_tracking(reference, algorithm):
    assert_same(reference.run(algorithm, 40, RING), reference.run(GTSGD(lr=0.03), 40, RING))


@pytest.mark.parametrize("gecl", [hf.LocalGECL(lr=0.03, local_steps=1), hf.GECL(lr=0.03)], ids=str)
def test_gecl_is_gradient_tracking_whose_tracker_is_the_gradient_minus_the_dual(reference, gecl):
    """G-ECL's own models, before they are mixed, are the models of gradient tracking at the same round."""
    tracking, dual = states(reference, GTSGD(lr=0.03), RING), states(reference, gecl, RING)
    assert_same(stacked(tracking, "x"), stacked(dual, "x"))
    gradients = torch.stack([reference.grads(state.x) for state in dual])
    assert_same(stacked(tracking, "y"), gradients - stacked(dual, "dual"))


def test_kgt_is_decentralised_scaffold_is_local_gecl_with_mixed_gradient(problem):
    kgt = states(problem, KGT(lr=0.005, local_steps=5), ring(problem))
    scaffold = states(problem, hf.DSCAFFOLD(lr=0.005, local_steps=5), ring(problem))
    gecl = states(problem, hf.LocalGECL(lr=0.005, local_steps=5, first_grad_at="mixed"), ring(problem))
    assert_same(stacked(kgt, "x"), stacked(scaffold, "x"))
    assert_same(stacked(kgt, "x"), stacked(gecl, "mixed"))
    assert_same(stacked(kgt, "c"), stacked(scaffold, "c_mean") - stacked(scaffold, "c"))
    assert_same(stacked(kgt, "c"), -stacked(gecl, "dual"))


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_kgt_on_a_complete_graph_is_scaffold(reference, server_lr):
    kgt = KGT(lr=0.02, local_steps=5, server_lr=server_lr)
    scaffold = hf.SCAFFOLD(lr=0.02, local_steps=5, server_lr=server_lr)
    assert_same(reference.run(kgt, 40, COMPLETE), reference.run(scaffold, 40))


def test_adapt_then_combine_on_a_complete_graph_is_gradient_descent(reference):
    """Everybody stays at the same model, where the mean tracker is the common gradient."""
    tracking = reference.run(GTSGD(lr=0.1, order="atc"), 40, COMPLETE)
    assert_same(tracking, reference.run(hf.FedAvg(lr=0.1, local_steps=1), 40))


@pytest.mark.parametrize(
    "algorithm", [NETFLEET(lr=0.01, local_steps=5), DSGT(lr=0.01, local_steps=5)], ids=str
)
def test_a_server_mixes_like_a_complete_graph(reference, algorithm):
    assert_same(reference.run(algorithm, 40, COMPLETE), reference.run(algorithm, 40, hf.server(10)))


def test_pdsgdm_without_momentum_is_gossip(problem):
    momentum = states(problem, PDSGDM(lr=0.01, local_steps=5, momentum=0.0), ring(problem))
    gossip = states(problem, hf.Gossip(lr=0.01, local_steps=5), ring(problem))
    assert_same(stacked(momentum, "x"), stacked(gossip, "x"))


def test_momentum_is_kept_from_round_to_round():
    """f = x^2/2 from 1, lr .1, momentum .5, by hand: m = 1, 1.4 | 1.46, 1.344; x = .9, .76 | .614, .4796."""
    result = hf.minimize(
        [lambda x: (x**2).sum() / 2] * 2, [1.0], PDSGDM(lr=0.1, local_steps=2, momentum=0.5), 2
    )
    expected = torch.tensor([1.0, 0.76, 0.4796], dtype=torch.float64)
    assert torch.allclose(result.x[:, 0, 0], expected, rtol=0, atol=1e-15)


# --- invariants ---------------------------------------------------------------------------------------------


class Recorder:
    """An objective that remembers every point and gradient it was asked for."""

    def __init__(self, problem) -> None:
        self.problem, self.points, self.gradients = problem, [], []

    def __getattr__(self, name: str):
        return getattr(self.problem, name)

    def minibatch_values_and_grads(self, points, nodes, round, step):
        computed = self.problem.minibatch_values_and_grads(points, nodes, round, step)
        self.points += points
        self.gradients += [gradient for _, gradient in computed]
        return computed


@pytest.mark.parametrize(
    "algorithm",
    [
        GTSGD(lr=0.02),
        GTSGD(lr=0.02, order="atc"),
        NETFLEET(lr=0.01, local_steps=4),
        KGT(lr=0.01, local_steps=4),
    ],
    ids=str,
)
def test_every_inner_step_moves_the_mean_model_along_the_mean_gradient(problem, algorithm):
    """The mean tracker is the mean minibatch gradient at every inner step, and mixing keeps means."""
    recorder = Recorder(problem)
    states(recorder, algorithm, ring(problem), rounds=15)
    points = torch.stack(recorder.points).mean(1)
    gradients = torch.stack(recorder.gradients).mean(1)
    assert len(points) >= 15 * getattr(algorithm, "local_steps", 1)
    assert torch.allclose(points[1:], points[:-1] - algorithm.lr * gradients[:-1], rtol=0, atol=1e-12)
    assert (points[1:] - points[:-1]).abs().amax(1).min() > 1e-5


@pytest.mark.parametrize(
    "algorithm",
    [
        GTSGD(lr=0.02),
        GTSGD(lr=0.02, order="atc"),
        NETFLEET(lr=0.01, local_steps=4),
        DSGT(lr=0.01, local_steps=4),
    ],
    ids=str,
)
def test_the_mean_tracker_is_the_mean_gradient(problem, algorithm):
    network = hf.Network.of(hf.erdos_renyi(problem.nodes, p=0.6, seed=1))
    for state in states(problem, algorithm, network, rounds=20):
        assert (state.y.mean(0) - state.g.mean(0)).abs().max() <= 1e-12 * state.g.abs().max()
    assert (state.y - state.g).abs().max() > 1e-3


@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_kgt_corrections_sum_to_zero(problem, server_lr):
    algorithm = KGT(lr=0.01, local_steps=4, server_lr=server_lr)
    network = hf.Network.of(hf.erdos_renyi(problem.nodes, p=0.6, seed=1))
    for state in states(problem, algorithm, network, rounds=20):
        assert state.c.sum(0).abs().max() <= 1e-12 * state.c.abs().max() * problem.nodes
    assert state.c.abs().max() > 1e-3


def test_netfleet_corrects_its_tracker_once_per_round_by_the_last_gradient(problem):
    """dual := g - y is constant in the local loop, and dual' = W dual + (I - W) g."""
    network = ring(problem)
    W = torch.tensor(network.dense())
    visited = states(problem, NETFLEET(lr=0.01, local_steps=4), network, rounds=20)
    for before, after in pairwise(visited):
        predicted = W @ (before.g - before.y) + before.g - W @ before.g
        assert torch.allclose(after.g - after.y, predicted, rtol=0, atol=1e-12)


# --- what bad input gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PDSGDM(lr=0.1, momentum=1.0), r"PDSGDM.momentum: should be less than 1, got 1.0"),
        (
            lambda: PDSGDM(lr=0.1, momentum=-0.1),
            r"PDSGDM.momentum: should be greater than or equal to 0, got -0.1",
        ),
        (lambda: NETFLEET(lr=0.1, local_steps=0), r"NETFLEET.local_steps: should be .* 1, got 0"),
        (lambda: DSGT(lr=0.1, local_steps=-1), r"DSGT.local_steps: should be .* 0, got -1"),
        (lambda: GTSGD(lr=0.1, order="both"), r"GTSGD.order: should be 'cta' or 'atc', got 'both'"),
        (lambda: KGT(lr=0.1, server_lr=0.0), r"KGT.server_lr: should be greater than 0, got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(build, message):
    with pytest.raises(hf.HoldfastError, match=message):
        build()
