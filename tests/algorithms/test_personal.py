"""Personalised methods: where their models end, in float64, and what they have in common with others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import Quadratics
from linear_rounds import reference_quadratics
from server_runs import simulate, stochastic_digits
from torch import Tensor

import holdfast as hf
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation

HEAD = 2


@pytest.fixture(scope="module")
def reference() -> Quadratics:
    return reference_quadratics(dim=5)


# --- Ditto --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.3, 5.0])
def test_dittos_personal_models_minimise_their_own_objective_near_the_common_optimum(reference, rho):
    simulation = simulate(hf.Ditto(lr=0.1, rho=rho, personal_steps=3), reference, 500)
    assert (simulation.models - reference.optimum).abs().max() < 1e-10
    identity = torch.eye(5, dtype=torch.float64)
    right = torch.einsum("nij,nj->ni", reference.A, reference.b) + rho * reference.optimum
    expected = torch.linalg.solve(reference.A + rho * identity, right)
    assert (simulation.personal_models - expected).abs().max() < 1e-10
    assert (expected - reference.optimum).norm(dim=-1).min() > 0.1  # they are personal


def test_dittos_common_model_is_fedavgs_bit_for_bit():
    objective = stochastic_digits()
    options = {"lr": 0.1, "local_steps": 3, "optimizer": hf.AdamW(keep=True)}
    fedavg, ditto = (simulate(method(**options), objective, 6) for method in (hf.FedAvg, hf.Ditto))
    assert torch.equal(fedavg.models, ditto.models)
    assert fedavg.personal_models is None
    assert ditto.personal_models.shape == (6, objective.dim)
    assert ditto.payload_bytes == fedavg.payload_bytes


def test_clients_outside_the_cohort_keep_their_personal_models(reference):
    simulation = simulate(hf.Ditto(lr=0.1), reference, 0, cohort=3)
    simulation.step()
    moved = (simulation.personal_models != reference.x0).any(-1)
    assert moved.sum() == 3
    assert torch.equal(moved.nonzero()[:, 0], simulation.rounds.cohort(0).sort().values)


def test_personal_steps_may_have_a_size_of_their_own(reference):
    one = simulate(hf.Ditto(lr=0.1, personal_lr=0.02), reference, 1).personal_models
    gradient = reference.grads(reference.x0.expand(10, -1))
    assert (one - (reference.x0 - 0.02 * gradient)).abs().max() < 1e-14  # the pull is zero in round 0


# --- FedRep -------------------------------------------------------------------------------------------------


def joint_optimum(problem: Quadratics) -> tuple[Tensor, Tensor]:
    """The body [d - k] and heads [n, k] that minimise sum_i f_i(body, head_i)."""
    A, target = problem.A, torch.einsum("nij,nj->ni", problem.A, problem.b)
    body = slice(0, 5 - HEAD)
    head = slice(5 - HEAD, 5)
    inverse = torch.linalg.inv(A[:, head, head])
    # heads eliminated: head = inverse (target_head - A_hb body)
    schur = A[:, body, body] - A[:, body, head] @ inverse @ A[:, head, body]
    right = target[:, body] - torch.einsum("nij,njk,nk->ni", A[:, body, head], inverse, target[:, head])
    shared = torch.linalg.solve(schur.sum(0), right.sum(0))
    rest = target[:, head] - torch.einsum("nij,j->ni", A[:, head, body], shared)
    return shared, torch.einsum("nij,nj->ni", inverse, rest)


def test_fedrep_finds_the_body_that_serves_all_heads(reference):
    simulation = simulate(hf.FedRep(lr=0.1, head=HEAD, head_steps=5), reference, 700)
    body, heads = joint_optimum(reference)
    found = simulation.personal_models
    assert (found[:, :-HEAD] - body).abs().max() < 1e-10
    assert (found[:, -HEAD:] - heads).abs().max() < 1e-10
    assert torch.equal(found, simulation.models)
    assert (body - reference.optimum[:-HEAD]).norm() > 0.1  # another body than that of one common model


def test_several_steps_on_the_body_drift(reference):
    simulation = simulate(hf.FedRep(lr=0.1, head=HEAD, head_steps=5, local_steps=5), reference, 700)
    assert (simulation.models[0, :-HEAD] - joint_optimum(reference)[0]).norm() > 1e-2


def test_a_round_of_fedrep_is_that_of_the_paper(reference):
    """Algorithm 1 client by client: the head with the body that came, then the body with the new head."""
    A, b, lr = reference.A.numpy(), reference.b.numpy(), 0.05
    body, heads = reference.x0.numpy()[:-HEAD], [reference.x0.numpy()[-HEAD:]] * 10
    for _ in range(6):
        bodies = []
        for i in range(10):
            for _ in range(3):
                heads[i] = heads[i] - lr * (A[i] @ (np.concatenate([body, heads[i]]) - b[i]))[-HEAD:]
            own = body
            for _ in range(2):
                own = own - lr * (A[i] @ (np.concatenate([own, heads[i]]) - b[i]))[:-HEAD]
            bodies.append(own)
        body = np.mean(bodies, axis=0)
    simulation = simulate(hf.FedRep(lr=lr, head=HEAD, head_steps=3, local_steps=2), reference, 6)
    expected = np.array([np.concatenate([body, head]) for head in heads])
    assert np.abs(simulation.models.numpy() - expected).max() < 1e-12


def test_only_the_body_is_sent(reference):
    simulation = simulate(hf.FedRep(lr=0.1, head=HEAD), reference, 4)
    assert simulation.traffic.numbers == 4 * 10 * 2 * (5 - HEAD)  # up and down
    cost = dry_run(hf.FedRep(lr=0.1, head=HEAD), hf.server(10))
    assert cost.vectors_per_round * 5 + cost.scalars_per_round == 10 * 2 * (5 - HEAD)


def test_fedrep_runs_between_neighbours_and_through_a_channel(reference):
    for channel in (hf.Identity(), hf.Half()):
        ring = hf.Network.of(hf.ring(10))
        simulation = Simulation(hf.FedRep(lr=0.05, head=HEAD), reference, ring, channel=channel)
        for _ in range(300):
            simulation.step()
        bodies = simulation.models[:, :-HEAD]
        assert (bodies - bodies.mean(0)).abs().max() < 0.5 * (bodies - reference.b[:, :-HEAD]).abs().max()


def test_a_head_that_is_all_of_the_model_is_refused(reference):
    message = r"FedRep.head: should be less than the model's 5 trainable numbers, got 5; count those of"
    with pytest.raises(hf.HoldfastError, match=message):
        simulate(hf.FedRep(lr=0.1, head=5), reference)
