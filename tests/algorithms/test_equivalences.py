"""Methods that the papers prove to be the same, run side by side in float64."""

from __future__ import annotations

import pytest
import torch
from server_runs import assert_same

import holdfast as hf

ROUNDS = 40
LR, K = 0.02, 5


def path(problem, algorithm, topology=None, rounds=ROUNDS):
    return hf.minimize(problem.functions, problem.x0, algorithm, rounds, topology=topology).x


@pytest.mark.parametrize("first_grad_at", ["local", "mixed"])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_proposition_1_complete_graph_equals_server(quadratics, first_grad_at, alpha):
    graph = hf.LocalGECL(lr=LR, local_steps=K, first_grad_at=first_grad_at, alpha=alpha)
    server = hf.LocalGECLServer(lr=LR, local_steps=K, first_grad_at=first_grad_at)
    assert_same(path(quadratics, graph, hf.complete(10)), path(quadratics, server))


def test_proposition_1_holds_for_warm_starts(quadratics):
    graph = hf.LocalGECL(lr=LR, local_steps=K, warm_start_rounds=1)
    server = hf.LocalGECLServer(lr=LR, local_steps=K, warm_start=True)
    assert_same(path(quadratics, graph, hf.complete(10)), path(quadratics, server))


def test_local_gecl_runs_on_a_server_as_on_a_complete_graph(quadratics):
    algorithm = hf.LocalGECL(lr=LR, local_steps=K, alpha=3.0)
    assert_same(path(quadratics, algorithm, hf.complete(10)), path(quadratics, algorithm, hf.server(10)))


def test_proposition_2_server_with_mixed_gradient_equals_scaffold(quadratics):
    gecl = hf.LocalGECLServer(lr=LR, local_steps=K, first_grad_at="mixed")
    assert_same(path(quadratics, gecl), path(quadratics, hf.SCAFFOLD(lr=LR, local_steps=K)))


def test_tracking_dscaffold_equals_local_gecl_with_mixed_gradient(quadratics):
    gecl = hf.LocalGECL(lr=0.005, local_steps=K, first_grad_at="mixed")
    scaffold = hf.DSCAFFOLD(lr=0.005, local_steps=K)
    assert_same(path(quadratics, gecl, hf.ring(10)), path(quadratics, scaffold, hf.ring(10)))


def test_naive_dscaffold_differs_on_a_ring_but_not_on_a_complete_graph(quadratics):
    naive = hf.DSCAFFOLD(lr=0.005, local_steps=K, naive=True)
    tracking = hf.DSCAFFOLD(lr=0.005, local_steps=K)
    ring = hf.ring(10)
    assert (path(quadratics, naive, ring) - path(quadratics, tracking, ring)).abs().max() > 1e-3
    complete = hf.complete(10)
    assert_same(path(quadratics, naive, complete), path(quadratics, tracking, complete))


@pytest.mark.parametrize("alpha", [0.0, 2.0])
def test_local_gecl_with_one_step_is_gecl(quadratics, alpha):
    local = hf.LocalGECL(lr=0.03, local_steps=1, alpha=alpha)
    plain = hf.GECL(lr=0.03, alpha=alpha)
    assert_same(path(quadratics, local, hf.ring(10)), path(quadratics, plain, hf.ring(10)))


def test_gossip_on_a_complete_graph_is_fedavg(quadratics):
    gossip = hf.Gossip(lr=LR, local_steps=K)
    fedavg = hf.FedAvg(lr=LR, local_steps=K)
    assert_same(path(quadratics, gossip, hf.complete(10)), path(quadratics, fedavg))


def test_fedprox_without_pull_is_fedavg(quadratics):
    fedprox = hf.FedProx(lr=LR, local_steps=K, rho=0.0)
    assert_same(path(quadratics, fedprox), path(quadratics, hf.FedAvg(lr=LR, local_steps=K)))


def test_gossip_with_one_step_is_dsgd_adapt_then_combine(quadratics):
    gossip = hf.Gossip(lr=LR, local_steps=1)
    dsgd = hf.DSGD(lr=LR, order="atc")
    assert_same(path(quadratics, gossip, hf.ring(10)), path(quadratics, dsgd, hf.ring(10)))


def test_fedavg_with_server_step_moves_by_that_multiple(quadratics):
    one, two = (
        path(quadratics, hf.FedAvg(lr=LR, local_steps=K, server_lr=s), rounds=1)[1] for s in (1.0, 2.0)
    )
    assert torch.allclose(2 * one, two, rtol=0, atol=1e-14)  # both start at 0
