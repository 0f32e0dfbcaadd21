"""QG-DSGDm, FedCM, DiLoCo, NoLoCo and decentralised Scaffnew against their papers, in float64."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
import torch
from server_runs import assert_same

import holdfast as hf
from holdfast.engines.common.simulation import Simulation

RING = hf.Network.of(hf.ring(10))
W = torch.tensor(RING.dense())


# --- QG-DSGDm -----------------------------------------------------------------------------------------------


def test_quasi_global_momentum_is_the_printed_method(quadratics):
    lr, beta = 0.02, 0.8
    x = quadratics.x0.expand(10, -1)
    hat, path = torch.zeros_like(x), [x]
    for _ in range(40):
        local = beta * hat + quadratics.grads(x)
        mixed = W @ (x - lr * local)
        hat = beta * hat + (1 - beta) * (x - mixed) / lr
        x = mixed
        path.append(x)
    assert_same(quadratics.run(hf.QGDSGDM(lr=lr, momentum=beta), 40, RING), torch.stack(path))


def test_quasi_global_momentum_of_zero_is_dsgd(quadratics):
    ours = quadratics.run(hf.QGDSGDM(lr=0.02, momentum=0.0), 40, RING)
    assert_same(ours, quadratics.run(hf.DSGD(lr=0.02, order="atc"), 40, RING))


def test_quasi_global_momentum_does_not_remove_the_bias(quadratics):
    models = quadratics.run(hf.QGDSGDM(lr=0.02), 1500, RING)[-1]
    assert (models - quadratics.optimum).abs().max() > 1e-2


# --- FedCM --------------------------------------------------------------------------------------------------


def test_fedcm_with_own_gradients_alone_is_fedavg(quadratics):
    ours = quadratics.run(hf.FedCM(lr=0.02, local_steps=5, alpha=1.0, server_lr=0.7), 40)
    assert_same(ours, quadratics.run(hf.FedAvg(lr=0.02, local_steps=5, server_lr=0.7), 40))


def test_fedcm_ends_where_fedavg_with_a_smaller_step_does(quadratics):
    """At rest the common direction is zero, and what is left is FedAvg with step alpha lr."""
    ours = quadratics.run(hf.FedCM(lr=0.05, local_steps=5, alpha=0.2), 600)[-1]
    slower = quadratics.run(hf.FedAvg(lr=0.01, local_steps=5), 1500)[-1]
    as_fast = quadratics.run(hf.FedAvg(lr=0.05, local_steps=5), 600)[-1]
    assert (ours - slower).abs().max() < 1e-9
    assert (ours - quadratics.optimum).norm() < 0.5 * (as_fast - quadratics.optimum).norm()


def test_fedcm_samples_clients(quadratics):
    models = quadratics.run(hf.FedCM(lr=0.02, local_steps=5), 300, cohort=4)[-1]
    assert (models - quadratics.optimum).abs().max() < 0.5


# --- DiLoCo and NoLoCo --------------------------------------------------------------------------------------


def test_diloco_is_torchs_adamw_inside_and_nesterov_outside(quadratics):
    """Algorithm 1 with the optimisers of torch; the inner ones are kept from round to round."""
    outer = torch.nn.Parameter(quadratics.x0.clone())
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    workers = [torch.nn.Parameter(quadratics.x0.clone()) for _ in range(10)]
    inner = [torch.optim.AdamW([x], lr=0.05, weight_decay=0.1) for x in workers]
    path = [outer.detach().clone()]
    for _ in range(15):
        for node, (x, optimizer) in enumerate(zip(workers, inner, strict=True)):
            x.data = outer.detach().clone()
            for _ in range(4):
                x.grad = quadratics.A[node] @ (x.detach() - quadratics.b[node])
                optimizer.step()
        outer.grad = outer.detach() - torch.stack([x.detach() for x in workers]).mean(0)
        nesterov.step()
        path.append(outer.detach().clone())
    ours = quadratics.run(hf.DiLoCo(lr=0.05, local_steps=4), 15)
    assert_same(ours, torch.stack(path)[:, None].expand_as(ours))


def test_nesterov_momentum_is_torchs():
    slopes = torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameter = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    theirs = torch.optim.SGD([parameter], lr=0.1, momentum=0.8, nesterov=True)
    ours = hf.Momentum(0.8, average=False, nesterov=True)
    x, memory = torch.zeros(1, 5, dtype=torch.float64), ours.init(torch.zeros(1, 5, dtype=torch.float64))
    for slope in slopes:
        parameter.grad = slope.clone()
        theirs.step()
        direction, memory = ours.update(slope[None], memory, x)
        x = x - 0.1 * direction
    assert_same(x[0], parameter.detach())


def test_noloco_without_momentum_is_gossip(quadratics):
    plain = hf.NoLoCo(lr=0.02, local_steps=4, momentum=0.0, outer_lr=1.0, pull=1.0, optimizer=hf.SGD())
    assert_same(quadratics.run(plain, 40, RING), quadratics.run(hf.Gossip(lr=0.02, local_steps=4), 40, RING))


def test_noloco_by_default_is_the_outer_step_of_the_authors_code(quadratics):
    """Pairs average their slow models and what Adam achieved; both enter the momentum with weight 0.7."""
    pairs, alpha, beta = hf.equi_dynamic(10, seed=0), 0.5, 0.7
    slow = quadratics.x0.repeat(10, 1)
    momentum = torch.zeros_like(slow)
    workers = [torch.nn.Parameter(x.clone()) for x in slow]
    inner = [torch.optim.Adam([x], lr=0.05) for x in workers]
    path = [slow.clone()]
    for now in range(15):
        for node, (x, optimizer) in enumerate(zip(workers, inner, strict=True)):
            x.data = slow[node].clone()
            for _ in range(4):
                x.grad = quadratics.A[node] @ (x.detach() - quadratics.b[node])
                optimizer.step()
        fast = torch.stack([x.detach() for x in workers])
        for group in {frozenset(map(int, row.nonzero()[0])) for row in weights_in(pairs, now)}:
            of = sorted(group)
            achieved, middle = (fast - slow)[of].mean(0), slow[of].mean(0)
            momentum[of] = alpha * momentum[of] + beta * achieved + beta * (middle - slow[of])
        slow = slow + momentum
        path.append(slow.clone())
    noloco = hf.NoLoCo(lr=0.05, local_steps=4, optimizer=hf.AdamW(weight_decay=0.0, keep=True))
    assert_same(quadratics.run(noloco, 15, pairs), torch.stack(path))


def weights_in(network: hf.Network, round: int) -> np.ndarray:
    """[n, n]"""
    weights = network.at(round).weights
    assert weights is not None
    return weights.toarray()


def test_noloco_where_everybody_averages_is_fedavg_with_momentum_outside(quadratics):
    noloco = hf.NoLoCo(lr=0.02, local_steps=4, optimizer=hf.SGD())
    outside = hf.Momentum(0.5, average=False)
    fedavg = hf.FedAvg(lr=0.02, local_steps=4, server_lr=0.7, server_optimizer=outside)
    assert_same(quadratics.run(noloco, 40, hf.server(10)), quadratics.run(fedavg, 40))


def test_noloco_draws_slow_models_together_in_random_pairs(quadratics):
    pairs = hf.equi_dynamic(10, seed=0)
    together, apart = (
        quadratics.run(hf.NoLoCo(lr=0.01, local_steps=4, pull=pull), 150, pairs)[-1] for pull in (1.0, 0.0)
    )
    spread = [float((x - x.mean(0)).norm()) for x in (together, apart)]
    assert spread[0] < 0.5 * spread[1]


# --- decentralised Scaffnew ---------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_scaffnew_that_always_communicates_is_exact_diffusion(quadratics, share):
    ours = quadratics.run(hf.DScaffnew(lr=0.1, p=1.0, share=share), 40, RING)
    assert_same(ours, quadratics.run(hf.ExactDiffusion(lr=0.1, share=share), 40, RING))


def test_scaffnew_between_everybody_is_scaffnew(quadratics):
    ours = quadratics.run(hf.DScaffnew(lr=0.1, p=0.3, share=1.0), 40, hf.server(10))
    assert_same(ours, quadratics.run(hf.Scaffnew(lr=0.1, p=0.3), 40))


@pytest.mark.parametrize(("p", "lr"), [(0.5, 0.1), (0.2, 0.05)])
def test_scaffnew_is_exact_on_a_ring_whatever_the_coin_says(quadratics, p, lr):
    algorithm = hf.DScaffnew(lr=lr, p=p)
    simulation = Simulation(algorithm, quadratics, RING, seed=3)
    for _ in range(350):
        simulation.step()
        h = simulation.state.h
        assert h.sum(0).abs().max() <= 1e-11 * max(float(h.abs().max()), 1)
    assert (simulation.models - quadratics.optimum).abs().max() < 1e-8
    wanted = quadratics.grads(quadratics.optimum.expand(10, -1))
    assert (algorithm.dual(simulation.state) - wanted).abs().max() < 1e-7


def test_scaffnew_says_where_w_itself_will_not_do(quadratics):
    links = nx.to_numpy_array(hf.ring(10))
    network = hf.Network.of(hf.ring(10), 0.4 * links + 0.2 * np.eye(10))
    with pytest.raises(hf.HoldfastError, match=r"eigenvalue below -0\.3333, and this one has -0\.6"):
        Simulation(hf.DScaffnew(lr=0.1, p=0.5, share=1.0), quadratics, network)
