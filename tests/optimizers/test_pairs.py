"""Every optimiser with every method that takes one; a new optimiser or method joins by being registered."""

from __future__ import annotations

import pytest
import torch
from conftest import make_quadratics
from test_conformance import CASES, NODES, Case, method, network, same_state
from test_executors import dense
from thinning import thinned

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.contract.optimizer import OPTIMIZERS, LocalOptimizer
from holdfast.core.tree import leaves
from holdfast.core.validation import parameters
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for

TAKERS = {
    case.name: case for case in reversed(CASES) if "optimizer" in parameters(ALGORITHMS[case.name])
}.values()
every_taker = pytest.mark.parametrize("case", TAKERS, ids=[case.name for case in TAKERS])

# Counters, clipping, several tensors and schedules in one
EVERYTHING = hf.WarmupCosine(
    warmup=3,
    steps=20,
    inner=hf.Clip(
        hf.halving(0.5, every=1), hf.AdamW(weight_decay=hf.linear(0.1, rounds=4), eps=0.1, keep=True)
    ),
)


def optimizers() -> list[LocalOptimizer]:
    every = [OPTIMIZERS.build(name, {}) for name in OPTIMIZERS]
    kept = [
        OPTIMIZERS.build(name, {"keep": True})
        for name in OPTIMIZERS
        if "keep" in parameters(OPTIMIZERS[name])
    ]
    return [*every, *kept, EVERYTHING]


def with_optimizer(case: Case, optimizer: LocalOptimizer) -> Case:
    return case._replace(options={**case.options, "optimizer": optimizer})


@pytest.fixture(scope="module")
def quadratics():
    return make_quadratics(NODES, L=2.0)


@pytest.mark.parametrize("case", thinned(TAKERS, every=3), ids=[case.name for case in TAKERS])
def test_every_optimiser_keeps_its_shape_and_is_resumed(case, quadratics):
    plain = dry_run(method(case), network(case))
    for optimizer in optimizers():
        algorithm = method(with_optimizer(case, optimizer))
        whole, half, resumed = (Simulation(algorithm, quadratics, network(case), seed=7) for _ in range(3))
        before = [(tensor.shape, tensor.dtype) for tensor in leaves(whole.state)]
        whole.step()
        half.step()
        assert [(tensor.shape, tensor.dtype) for tensor in leaves(whole.state)] == before, optimizer
        resumed.restore(*half.snapshot())
        whole.step()
        resumed.step()
        assert same_state(whole, resumed), optimizer
        assert all(tensor.isfinite().all() for tensor in leaves(whole.state)), optimizer
        # An optimiser costs no gradients, and nothing is sent for it but where models do not tell gradients.
        cost = dry_run(algorithm, network(case))
        sends_more = optimizer.rescales and case.name in {
            "vrl-sgd",
            "local-gecl-server",
            "scaffnew",
            "led",
            "d-scaffnew",
        }
        assert cost.vectors_per_round == (2 if sends_more else 1) * plain.vectors_per_round, optimizer
        assert cost.gradients_per_round == plain.gradients_per_round


@pytest.fixture
def traced(monkeypatch) -> None:
    """Short runs are traced, too; programs stay as they were traced."""
    monkeypatch.setattr("holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 0)
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)


def assert_replayed(algorithm, network) -> None:
    plain = Simulation(algorithm, dense(), network, seed=7)
    replayed = Simulation(algorithm, dense(), network, seed=7, executor=executor_for(torch.device("cpu")))
    replayed.prepare(4)
    for _ in range(4):
        plain.step()
        replayed.step()
    assert replayed.executor.replay is not None, "it ran step by step"
    assert (replayed.models - plain.models).norm() <= 1e-5 * plain.models.norm()
    for now, expected in zip(leaves(replayed.state), leaves(plain.state), strict=True):
        assert (now - expected).norm() <= 1e-4 * max(expected.norm(), 1e-3)


REPLAYABLE = [
    case for case in TAKERS if case.name not in {"scaffnew", "d-scaffnew", "dspodfl"}
]  # these draw coins


@pytest.mark.parametrize("case", thinned(REPLAYABLE, every=4), ids=[case.name for case in REPLAYABLE])
def test_rounds_with_counters_and_schedules_are_replayed(case, traced):
    assert_replayed(method(with_optimizer(case, EVERYTHING)), network(case))


@pytest.mark.parametrize("optimizer", thinned(optimizers()[:-1], every=4), ids=repr)
def test_rounds_with_every_optimiser_are_replayed(optimizer, traced):
    assert_replayed(hf.LocalGECL(lr=0.01, local_steps=3, optimizer=optimizer), hf.Network.of(hf.ring(NODES)))


@pytest.mark.parametrize("optimizer", [hf.FedAdam(), hf.Momentum(weight_decay=hf.linear(0.1, 9))], ids=repr)
def test_rounds_with_a_server_optimiser_are_replayed(optimizer, traced):
    algorithm = hf.FedAvg(lr=0.05, local_steps=2, server_lr=0.01, server_optimizer=optimizer)
    assert_replayed(algorithm, hf.server(NODES))
