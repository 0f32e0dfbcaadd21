"""Personalised methods: where their models end, in float64, and what they have in common with others."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Quadratics
from linear_rounds import reference_quadratics
from server_runs import simulate, stochastic_digits
from torch import Tensor, nn

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


# --- parts by name ------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Parameters in the order body.weight, norm.weight, norm.bias, head.weight, head.bias."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)).relu())


def clouds() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 4, generator=draw) + node, torch.arange(12) % 2) for node in range(3)]


def trained(method: hf.Algorithm, model: nn.Module) -> hf.TrainResult:
    options: Any = {"topology": "server", "batch_size": "full", "dtype": "float64", "metrics": []}
    return hf.train(method, model=model, data=clouds(), rounds=3, **options)


SIZES = {"body.weight": 12, "norm.weight": 3, "norm.bias": 3, "head.weight": 6, "head.bias": 2}


@pytest.mark.parametrize(
    ("names", "ranges"),
    [
        ("head", ((18, 26),)),
        (["head.weight", "head.bias"], ((18, 26),)),
        ("*.bias", ((15, 18), (24, 26))),
        (["norm", "head.bias"], ((12, 18), (24, 26))),
    ],
)
def test_parts_are_found_by_name(names: Any, ranges: Any) -> None:
    found: Any = hf.FedRep(lr=0.1, head=names).for_model(SIZES).head
    assert found.ranges == ranges
    x = torch.arange(52.0).view(2, 26)
    rest, part = found.split(x)
    assert part[0].tolist() == [i for a, b in ranges for i in range(a, b)]
    assert torch.equal(found.join(rest, part), x)


def test_a_head_by_name_is_that_of_as_many_numbers() -> None:
    torch.manual_seed(0)
    model = Nested()
    by_name = trained(hf.FedRep(lr=0.1, head="head", head_steps=2), model)
    assert torch.equal(by_name.models, trained(hf.FedRep(lr=0.1, head=8, head_steps=2), model).models)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("hed", "unknown parameter or module of the model 'hed'"),
        (["body", "norm", "head"], "these are all parameters, and nothing is left"),
        (
            0,
            r"FedRep.head: should be how many of the model's last numbers, at least 1, or .* got 0",
        ),
    ],
)
def test_parts_that_are_not_there(head: Any, message: str) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        trained(hf.FedRep(lr=0.1, head=head), Nested())


def test_a_part_by_name_needs_a_model(reference) -> None:
    with pytest.raises(hf.HoldfastError, match="fc: parts by name are found where the model is known"):
        simulate(hf.FedRep(lr=0.1, head="fc"), reference)


# --- FedBN --------------------------------------------------------------------------------------------------


def test_fedbn_is_the_plain_loop() -> None:
    """torch's SGD client by client; then all parameters but the norm's are averaged."""
    torch.manual_seed(0)
    model = Nested()
    result = trained(hf.FedBN(lr=0.2, local="norm", local_steps=2), model)
    clients = [deepcopy(model).double() for _ in range(3)]
    for _ in range(3):
        for client, (x, y) in zip(clients, clouds(), strict=True):
            optimizer = torch.optim.SGD(client.parameters(), lr=0.2)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(x.double()), y).backward()
                optimizer.step()
        with torch.no_grad():
            for name, _ in model.named_parameters():
                own = [client.get_parameter(name) for client in clients]
                mean = torch.stack(list(own)).mean(0)
                for parameter in own if not name.startswith("norm") else []:
                    parameter.copy_(mean)
    expected = torch.stack([nn.utils.parameters_to_vector(client.parameters()) for client in clients])
    assert (result.models - expected).abs().max() < 1e-12
    norms = result.models[:, 12:18]
    assert (norms[0] - norms[1]).abs().max() > 1e-2
    assert torch.equal(result.models[0, :12], result.models[1, :12])


def test_fedbn_sends_nothing_of_what_stays() -> None:
    cost = dry_run(hf.FedBN(lr=0.1, local="norm").for_model(SIZES), hf.server(4))
    assert cost.vectors_per_round * 26 + cost.scalars_per_round == 4 * 2 * (26 - 6)
