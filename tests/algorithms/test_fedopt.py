"""FedOpt: FedAvg with a server optimiser, against Algorithm 2 of Reddi et al. written out, and its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from command_line import holdfast, make_plan
from linear_rounds import reference_quadratics
from server_runs import simulate

import holdfast as hf
from holdfast.core.tree import leaves

LR, STEPS, SERVER_LR, TAU, BETA1, BETA2 = 0.03, 4, 0.3, 0.02, 0.8, 0.95


@pytest.fixture(scope="module")
def reference():
    return reference_quadratics(dim=4)


def algorithm_2(problem, rule: str, rounds: int, rho: float = 0.0) -> np.ndarray:
    """The paper's pseudocode, client by client, everybody taking part; [rounds + 1, d]."""
    A, b = problem.A.numpy(), problem.b.numpy()
    x = problem.x0.numpy().copy()
    m, v = np.zeros_like(x), np.full_like(x, TAU**2)
    path = [x]
    for _ in range(rounds):
        changes = []
        for A_i, b_i in zip(A, b, strict=True):
            x_i = x.copy()
            for _ in range(STEPS):
                x_i = x_i - LR * (A_i @ (x_i - b_i) + rho * (x_i - x))
            changes.append(x_i - x)
        delta = np.mean(changes, axis=0)
        if rule == "momentum":  # FedAvgM, Hsu et al. 2019
            m = BETA1 * m + delta
            x = x + SERVER_LR * m
        else:
            m = BETA1 * m + (1 - BETA1) * delta
            if rule == "fedadagrad":
                v = v + delta**2
            elif rule == "fedyogi":
                v = v - (1 - BETA2) * delta**2 * np.sign(v - delta**2)
            else:
                v = BETA2 * v + (1 - BETA2) * delta**2
            x = x + SERVER_LR * m / (np.sqrt(v) + TAU)
        path.append(x)
    return np.array(path)


RULES = {
    "fedadam": hf.FedAdam(beta1=BETA1, beta2=BETA2, tau=TAU),
    "fedyogi": hf.FedYogi(beta1=BETA1, beta2=BETA2, tau=TAU),
    "fedadagrad": hf.FedAdagrad(beta1=BETA1, tau=TAU),
    "momentum": hf.Momentum(beta=BETA1, average=False),
}


@pytest.mark.parametrize("rule", RULES)
def test_every_round_is_that_of_the_paper(reference, rule):
    options = {"lr": LR, "local_steps": STEPS, "server_lr": SERVER_LR, "server_optimizer": RULES[rule]}
    path = reference.run(hf.FedAvg(**options), 60)[:, 0].numpy()
    expected = algorithm_2(reference, rule, 60)
    assert np.abs(expected[-1] - expected[0]).max() > 0.1
    assert np.abs(path - expected).max() < 1e-12
    prox = reference.run(hf.FedProx(**options, rho=0.5), 60)[:, 0].numpy()
    assert np.abs(prox - algorithm_2(reference, rule, 60, rho=0.5)).max() < 1e-12


def test_the_rules_differ(reference):
    ends = [algorithm_2(reference, rule, 5)[-1] for rule in RULES]
    assert torch.pdist(torch.tensor(np.array(ends))).min() > 1e-3


SOFT = [hf.FedAdam(tau=1.0), hf.FedYogi(tau=1.0), hf.FedAdagrad(tau=1.0), hf.Momentum(average=False)]


@pytest.mark.parametrize("optimizer", SOFT, ids=repr)
def test_a_server_optimiser_ends_where_fedavg_ends(reference, optimizer):
    """It stands still where the mean change is zero: at the optimum after one step, biased after more."""
    server_lr = 0.1 if isinstance(optimizer, hf.Momentum) else 1.0
    for steps in (1, 5):
        plain = reference.run(hf.FedAvg(lr=0.05, local_steps=steps), 500)[-1, 0]
        fedopt = hf.FedAvg(lr=0.05, local_steps=steps, server_lr=server_lr, server_optimizer=optimizer)
        assert (reference.run(fedopt, 900)[-1, 0] - plain).norm() < 1e-10
        bias = (plain - reference.optimum).norm()
        assert bias < 1e-10 if steps == 1 else bias > 0.2


def test_the_plain_server_is_fedavg_bit_for_bit(reference):
    fedavg, sgd = (
        simulate(hf.FedAvg(lr=0.05, local_steps=3, server_lr=0.7, **options), reference, 5)
        for options in ({}, {"server_optimizer": "sgd"})
    )
    assert torch.equal(fedavg.models, sgd.models)
    assert len(list(leaves(fedavg.state))) == 1


def test_the_servers_memory_lasts_with_cohorts_and_is_resumed(reference):
    algorithm = hf.FedAvg(lr=0.05, local_steps=3, server_optimizer=hf.FedAdam(), server_lr=0.1)
    whole, half, resumed = (simulate(algorithm, reference, rounds, cohort=4) for rounds in (6, 3, 0))
    resumed.restore(*half.snapshot())
    for _ in range(3):
        resumed.step()
    assert all(map(torch.equal, leaves(whole.state), leaves(resumed.state)))
    assert whole.state.server.memory.m.shape == (4,)
    assert whole.payload_bytes == simulate(hf.FedAvg(lr=0.05), reference, 6, cohort=4).payload_bytes


def test_the_rules_are_listed_and_chosen_in_a_file(tmp_path):
    listed = {
        entry["name"]: entry["summary"] for entry in json.loads(holdfast("list", "optimizers", "--json").out)
    }
    assert all("Reddi" in listed[name] for name in ("fedadam", "fedyogi", "fedadagrad"))
    text = """
rounds = 2
[problem]
dataset = "digits"
nodes = 4
[network]
topology = "server"
[[algorithm]]
name = "fedavg"
lr = 0.1
server_lr = 0.01
server_optimizer = { name = "fedyogi", tau = 0.01 }
"""
    plan = make_plan(tmp_path, text=text)
    assert [plan.method(job).server_optimizer for job in plan.jobs] == [hf.FedYogi(tau=0.01)]
