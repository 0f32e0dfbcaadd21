"""Exact Diffusion, NIDS, EXTRA and LED: the exact optimum with one vector per link, in float64."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import torch
from conftest import Quadratics, make_quadratics
from linear_rounds import contraction
from server_runs import assert_same, stochastic_digits

import holdfast as hf
from holdfast.core.tree import leaves
from holdfast.engines.common.simulation import Simulation

RING = hf.Network.of(hf.ring(10))
RANDOM = hf.Network.of(hf.erdos_renyi(10, p=0.5, seed=1))
EXACT = [
    hf.ExactDiffusion(lr=0.15),
    hf.ExactDiffusion(lr=0.15, share=1.0),
    hf.NIDS(lr=0.15),
    hf.EXTRA(lr=0.1),
    hf.LED(lr=0.03, local_steps=4),
    hf.LED(lr=0.04, local_steps=4, share=1.0),
]


# --- the optimum --------------------------------------------------------------------------------------------


every_network = pytest.mark.parametrize(
    "network", [RING, RANDOM, hf.server(10)], ids=["ring", "random", "server"]
)


@every_network
@pytest.mark.parametrize("algorithm", EXACT, ids=str)
def test_heterogeneous_nodes_meet_at_the_exact_optimum(quadratics, algorithm, network):
    models = quadratics.run(algorithm, 400, network)[-1]
    assert (models - quadratics.optimum).abs().max() < 1e-9


@every_network
def test_gossip_does_not(quadratics, network):
    plain = quadratics.run(hf.Gossip(lr=0.03, local_steps=4), 400, network)[-1]
    assert (plain - quadratics.optimum).abs().max() > 1e-2


def test_nids_finds_the_sparse_minimiser_with_l1(quadratics):
    """x minimises f + l1 ‖x‖₁ if -∇f(x)/l1 is a subgradient of ‖x‖₁."""
    # Where a node's own subgradient ends at the edge of [-l1, l1], rounding decides whether its 0 is exact.
    l1 = 4.0
    x = quadratics.run(hf.NIDS(lr=0.15, l1=l1), 600, RING)[-1]
    assert (x - x.mean(0)).abs().max() < 1e-9
    x = x.mean(0)
    slope = -quadratics.grads(x.expand(10, -1)).mean(0) / l1
    zero = x == 0
    assert 0 < zero.sum() < len(x)
    assert (slope[zero].abs() < 1).all()
    assert torch.allclose(slope[~zero], torch.sign(x[~zero]), rtol=0, atol=1e-8)


# --- the same method by another name ------------------------------------------------------------------------


def d_squared(problem: Quadratics, W: torch.Tensor, lr: float, rounds: int) -> torch.Tensor:
    """D² as printed by Tang et al. 2018, Algorithm 1: [rounds + 1, n, d]."""
    x = problem.x0.expand(problem.nodes, -1)
    path = [x, W @ (x - lr * problem.grads(x))]
    for _ in range(rounds - 1):
        before, now = path[-2:]
        half = 2 * now - before - lr * problem.grads(now) + lr * problem.grads(before)
        path.append(W @ half)
    return torch.stack(path)


def exact_diffusion(problem: Quadratics, W: torch.Tensor, lr: float, rounds: int) -> torch.Tensor:
    """Exact Diffusion as printed by Yuan et al. 2019: adapt, correct, combine with (I + W)/2."""
    x = psi = problem.x0.expand(problem.nodes, -1)
    path = [x]
    for _ in range(rounds):
        adapted = x - lr * problem.grads(x)
        corrected = adapted + x - psi
        x, psi = (corrected + W @ corrected) / 2, adapted
        path.append(x)
    return torch.stack(path)


def test_exact_diffusion_is_the_printed_method_and_with_w_itself_d_squared(quadratics):
    W = torch.tensor(RANDOM.dense())
    ours = quadratics.run(hf.ExactDiffusion(lr=0.1), 40, RANDOM)
    assert_same(ours, exact_diffusion(quadratics, W, 0.1, 40))
    full = quadratics.run(hf.ExactDiffusion(lr=0.1, share=1.0), 40, RANDOM)
    assert_same(full, d_squared(quadratics, W, 0.1, 40))
    half = (torch.eye(10, dtype=W.dtype) + W) / 2
    assert_same(ours, d_squared(quadratics, half, 0.1, 40))
    assert (ours - full).abs().max() > 1e-2


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_led_with_one_step_is_exact_diffusion(quadratics, share):
    led = quadratics.run(hf.LED(lr=0.1, share=share), 40, RING)
    assert_same(led, quadratics.run(hf.ExactDiffusion(lr=0.1, share=share), 40, RING))


def test_nids_without_a_regulariser_is_exact_diffusion(quadratics):
    assert_same(
        quadratics.run(hf.NIDS(lr=0.1), 40, RING), quadratics.run(hf.ExactDiffusion(lr=0.1), 40, RING)
    )


def printed_led(problem: Quadratics, W: torch.Tensor, lr: float, steps: int, rounds: int) -> torch.Tensor:
    """LED as printed by Alghunaim 2023, Algorithm 1, with β = 1/K."""
    x = problem.x0.expand(problem.nodes, -1)
    y, path = torch.zeros_like(x), [x]
    for _ in range(rounds):
        phi = x
        for _ in range(steps):
            phi = phi - lr * problem.grads(phi) - y / steps
        x = W @ phi
        y = y + phi - x
        path.append(x)
    return torch.stack(path)


def test_led_is_the_printed_method(quadratics):
    ours = quadratics.run(hf.LED(lr=0.03, local_steps=4, share=1.0), 40, RANDOM)
    assert_same(ours, printed_led(quadratics, torch.tensor(RANDOM.dense()), 0.03, 4, 40))


@pytest.mark.parametrize(
    "network", [hf.server(10), hf.Network.of(hf.complete(10))], ids=["server", "complete"]
)
def test_led_is_vrl_sgd_where_mixing_averages_everybody(quadratics, network):
    led = quadratics.run(hf.LED(lr=0.03, local_steps=4, share=1.0), 40, network)
    assert_same(led, quadratics.run(hf.VRLSGD(lr=0.03, local_steps=4), 40))


def test_led_with_adamw_sends_gradients_too_and_is_kgt(quadratics):
    adam = hf.AdamW(weight_decay=0.0, eps=1.0)
    led = quadratics.run(hf.LED(lr=0.03, local_steps=4, share=1.0, optimizer=adam), 40, RING)
    assert_same(led, quadratics.run(hf.KGT(lr=0.03, local_steps=4, optimizer=adam), 40, RING))


def test_nids_mixes_gradients_where_extra_does_not(quadratics):
    """With linear f_i gradients never change, and the two differ by the mixing of the first step alone."""
    slopes = torch.randn(10, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slopes -= slopes.mean(0)
    functions = [lambda x, b=b: x @ b for b in slopes]
    paths = [
        hf.minimize(functions, [0.0] * 3, method, 40, topology=hf.ring(10)).x
        for method in (hf.NIDS(lr=1.0), hf.EXTRA(lr=1.0))
    ]
    half = (torch.eye(10, dtype=torch.float64) + torch.tensor(RING.dense())) / 2
    assert_same(paths[0], half @ paths[1])
    difference = quadratics.run(hf.NIDS(lr=0.1), 5, RING) - quadratics.run(hf.EXTRA(lr=0.1), 5, RING)
    assert difference.abs().max() > 1e-2


# --- invariants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [hf.LED(lr=0.01, local_steps=4), hf.LED(lr=0.01, share=1.0)], ids=str)
def test_duals_sum_to_zero_with_noisy_gradients(algorithm):
    problem = stochastic_digits()
    simulation = Simulation(algorithm, problem, hf.Network.of(hf.ring(problem.nodes)))
    for _ in range(20):
        simulation.step()
    dual = simulation.state.dual
    assert dual.abs().max() > 1e-3
    assert dual.sum(0).abs().max() <= 1e-12 * dual.abs().max() * problem.nodes


def test_compression_with_feedback_keeps_the_optimum_and_the_sum_of_the_duals(quadratics):
    algorithm, channel = hf.LED(lr=0.02, local_steps=4), hf.TopK(0.5, gamma=0.4)  # two entries of four
    simulation = Simulation(algorithm, quadratics, RING, channel=channel)
    for _ in range(450):
        simulation.step()
    assert (simulation.models - quadratics.optimum).abs().max() < 1e-8
    wanted = quadratics.grads(quadratics.optimum.expand(10, -1))
    dual = wanted - wanted.mean(0)  # the gradients' sum at the optimum is zero but for rounding
    kept = next(leaf for leaf in leaves(simulation.state) if torch.allclose(leaf, dual, rtol=0, atol=1e-6))
    assert kept.sum(0).abs().max() < 1e-11


def test_duals_tend_to_the_gradients_at_the_optimum(quadratics):
    algorithm = hf.LED(lr=0.03, local_steps=4)
    simulation = Simulation(algorithm, quadratics, RING)
    for _ in range(400):
        simulation.step()
    wanted = quadratics.grads(quadratics.optimum.expand(10, -1))
    assert wanted.abs().max() > 1
    assert (algorithm.dual(simulation.state) - wanted).abs().max() < 1e-8


@pytest.mark.parametrize("algorithm", EXACT, ids=str)
def test_the_optimum_survives_a_change_of_the_step_size(quadratics, algorithm):
    """Corrections are kept in the unit of gradients: a schedule does not throw settled nodes off."""
    halved = replace(algorithm, lr=hf.halving(algorithm.lr, every=300))
    path = quadratics.run(halved, 310, RING)
    assert (path[300:] - quadratics.optimum).abs().max() < 1e-6


# --- when they fail -----------------------------------------------------------------------------------------


def alike(nodes: int = 10, curvature: float = 1.0) -> Quadratics:
    """Nodes that all have f(x) = curvature x²/2."""
    A = curvature * torch.ones(nodes, 1, 1, dtype=torch.float64)
    return Quadratics(A, torch.ones(nodes, 1, dtype=torch.float64))


def slowest(algorithm, network) -> float:
    """Spectral radius of a round on f = x²/2."""
    return contraction(alike(), algorithm, network)[0]


def test_exact_diffusion_allows_steps_up_to_2_over_l_on_any_graph_and_extra_does_not():
    """EXTRA: ηL < (1 + 3λ)/2 with the least eigenvalue λ of (I + W)/2, which is 1/3 on an even ring."""
    assert slowest(hf.ExactDiffusion(lr=1.99), RING) < 1 < slowest(hf.ExactDiffusion(lr=2.01), RING)
    assert slowest(hf.EXTRA(lr=0.99), RING) < 1 < slowest(hf.EXTRA(lr=1.01), RING)


def weighted_ring(weight: float) -> hf.Network:
    """A ring of 10 where every link has this weight: the least eigenvalue is 1 - 4 weight."""
    graph = hf.ring(10)
    A = nx.to_numpy_array(graph)
    return hf.Network.of(graph, weight * A + (1 - 2 * weight) * np.eye(10))


@pytest.mark.parametrize("method", [hf.ExactDiffusion, hf.LED])
def test_with_w_itself_eigenvalues_below_minus_one_third_are_refused(quadratics, method):
    network = weighted_ring(0.34)
    assert network.least_eigenvalue == pytest.approx(1 - 4 * 0.34)
    with pytest.raises(
        hf.HoldfastError, match=r"eigenvalue below -0.3333, and this one has -0.36; lower its share"
    ):
        Simulation(method(lr=0.01, share=1.0), quadratics, network)
    assert slowest(method(lr=0.01), network) < 1
    assert slowest(method(lr=0.01, share=0.95), network) < 1
    swaps = weighted_ring(0.5)  # the least eigenvalue there is, -1: up to a share of 2/3 any W will do
    assert slowest(method(lr=0.01, share=2 / 3), swaps) < 1
    with pytest.raises(hf.HoldfastError, match=r"eigenvalue below -0\.99, and this one has -1"):
        Simulation(method(lr=0.01, share=0.67), quadratics, swaps)
    assert slowest(method(lr=0.01, share=1.0), RING) < 1  # exactly -1/3: curvature is what holds it


def test_an_eigenvalue_below_minus_one_third_does_diverge():
    problem = alike(curvature=1.0)
    W = torch.tensor(weighted_ring(0.36).dense())
    start = Quadratics(problem.A, torch.linspace(-1, 1, 10, dtype=torch.float64)[:, None])
    assert d_squared(start, W, 0.01, 200).abs().max() > 1e3
    assert d_squared(start, torch.tensor(RING.dense()), 0.01, 200).abs().max() < 1


@pytest.mark.parametrize("algorithm", EXACT, ids=str)
def test_a_graph_that_changes_is_refused(algorithm):
    problem = make_quadratics(4)
    pairs = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(0, 2), (1, 3)])]
    network = hf.Network.varying(lambda epoch: pairs[epoch % 2])
    with pytest.raises(hf.HoldfastError, match=r"needs links and weights that are the same in every round"):
        Simulation(algorithm, problem, network)
