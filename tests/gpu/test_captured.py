"""The GPU executor against the plain simulator; these tests need a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from changing_methods import REFUSED, REPLAYED, name
from devices import GPU_MARKS
from test_conformance import CASES, NODES, case_id, method, network

import holdfast as hf
from holdfast.contract.parameters import halving
from holdfast.core.precision import compute_in
from holdfast.data import DATASETS
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

pytestmark = GPU_MARKS


def on_gpu() -> ModelProblem:
    digits = DATASETS.build("digits", {})
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=NODES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("mlp", {"hidden": [12]}, input_shape=digits.input_shape, outputs=10)
    flat = FlatModel(model, torch.device("cuda"), torch.float32)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=16, seed=7)


GPU = torch.device("cuda")
COMPILED = 10**3  # rounds of five steps for which this pays


def both(algorithm, where, rounds: int, *, planned: int = 1, cohort=None):
    plain = Simulation(algorithm, on_gpu(), where, seed=7, cohort=cohort or "all")
    captured = Simulation(
        algorithm, on_gpu(), where, seed=7, cohort=cohort or "all", executor=executor_for(GPU)
    )
    print(captured.prepare(planned))
    for _ in range(rounds):
        plain.step()
        captured.step()
    return plain, captured


def assert_agree(plain: Simulation, captured: Simulation) -> None:
    assert (plain.models - captured.models).norm() <= 1e-5 * plain.models.norm()
    assert plain.traffic == captured.traffic
    # Delays are sums of fractions: gradient by gradient here, round by round there.
    assert captured.work.delay == pytest.approx(plain.work.delay, rel=1e-12)
    assert captured.work.raw_delay == pytest.approx(plain.work.raw_delay, rel=1e-12)
    counted = {"delay": 0.0, "raw_delay": 0.0}
    assert replace(captured.work, **counted) == replace(plain.work, **counted)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_replayed_rounds_are_the_same_rounds(case):
    plain, captured = both(method(case), network(case), 20)
    assert_agree(plain, captured)


@pytest.mark.parametrize(
    "algorithm", [hf.FedAvg(lr=0.05, local_steps=5), hf.SCAFFOLD(lr=0.05, local_steps=5)]
)
def test_compiled_rounds_agree(algorithm, capsys):
    plain, captured = both(algorithm, hf.server(NODES), 20, planned=COMPILED)
    assert captured.executor.replay is not None
    assert "CUDA graph, compiled;" in capsys.readouterr().out
    assert_agree(plain, captured)


def test_a_round_that_cannot_be_compiled_is_recorded_all_the_same(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile", broken)
    plain, captured = both(hf.FedAvg(lr=0.05, local_steps=5), hf.server(NODES), 5, planned=COMPILED)
    assert captured.executor.replay is not None
    assert "not compiled, since a faster way failed: no compiler here" in capsys.readouterr().out
    assert_agree(plain, captured)


def test_where_rounds_run_step_by_step_a_broken_compiler_does_no_harm(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile", broken)
    plain, captured = both(hf.Scaffnew(lr=0.05, p=0.3), hf.server(NODES), 5, planned=COMPILED)
    assert captured.executor.replay is None
    assert_agree(plain, captured)


@pytest.mark.parametrize("planned", [1, COMPILED])
def test_the_exchange_is_not_rounded_to_tf32(planned):
    compute_in("tf32")
    try:
        simulation = Simulation(
            hf.LocalGECL(lr=0.05, local_steps=5),
            on_gpu(),
            hf.Network.of(hf.ring(NODES)),
            executor=executor_for(GPU),
        )
        print(simulation.prepare(planned))
        for _ in range(20):
            simulation.step()
    finally:
        compute_in("float32")
    duals = simulation.method.dual(simulation.state)
    assert duals.sum(0).norm() <= 1e-5 * duals.norm()  # with 1/3 rounded to ten bits: more than 1e-3


def test_schedules_and_cohorts_change_from_replay_to_replay():
    algorithm = hf.SCAFFOLD(lr=halving(0.05, every=3), local_steps=3)
    plain, captured = both(algorithm, hf.server(NODES), 20, cohort=2)
    assert captured.executor.replay is not None
    assert_agree(plain, captured)


@pytest.mark.parametrize("planned", [20, COMPILED])
@pytest.mark.parametrize(("algorithm", "where"), REPLAYED, ids=[name(given[0]) for given in REPLAYED])
def test_what_at_changes_is_replayed(algorithm, where, planned):
    plain, captured = both(algorithm, where, 20, planned=planned)
    assert captured.executor.replay is not None
    assert_agree(plain, captured)


@pytest.mark.parametrize(("algorithm", "where", "field"), REFUSED, ids=[name(given[0]) for given in REFUSED])
def test_what_at_changes_and_cannot_be_replayed_is_named(algorithm, where, field, capsys):
    plain, captured = both(algorithm, where, 5, planned=5)
    assert captured.executor.replay is None
    assert field in capsys.readouterr().out
    assert_agree(plain, captured)


def test_what_cannot_be_recorded_runs_step_by_step_and_says_why(capsys):
    plain, captured = both(hf.Scaffnew(lr=0.05, p=0.3), hf.server(NODES), 10)
    assert captured.executor.replay is None
    assert "cannot be recorded" in capsys.readouterr().out
    assert_agree(plain, captured)


def test_resuming_a_replayed_run():
    algorithm = hf.LocalGECL(lr=0.05, local_steps=3)
    _, whole = both(algorithm, hf.Network.of(hf.ring(NODES)), 8)
    _, half = both(algorithm, hf.Network.of(hf.ring(NODES)), 4)
    tensors, counters = half.snapshot()
    for _ in range(3):
        half.step()
    half.restore(tensors, counters)
    for _ in range(4):
        half.step()
    assert_agree(whole, half)
