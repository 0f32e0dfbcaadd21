"""Rounds compiled on a CPU against the plain simulator."""

from __future__ import annotations

import shutil

import pytest
import torch
from test_conformance import NODES
from test_executor_rules import Annealed, SignDescent
from test_executors import assert_close, dense
from torch._dynamo.utils import counters

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate import fused as tracing
from holdfast.engines.simulate.choice import executor_for
from holdfast.problem.private import Release, counted_noise

CPU = torch.device("cpu")
RING, STAR = hf.Network.of(hf.ring(NODES)), hf.server(NODES)
METHODS = [
    (hf.FedAvg(lr=0.05, local_steps=5), STAR),
    (hf.SCAFFOLD(lr=0.05, local_steps=5), STAR),
    (hf.LocalGECL(lr=0.05, local_steps=5), RING),
    (hf.NETFLEET(lr=0.05, local_steps=5), RING),
]


@pytest.fixture
def always(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 0)


@pytest.fixture
def without_compiler(monkeypatch) -> None:
    """Programs stay as they were traced: not every machine has a C++ compiler."""
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)


def both(algorithm, network, rounds: int = 6, cohort: int | None = None):
    plain = Simulation(algorithm, dense(), network, seed=7, cohort=cohort or "all")
    compiled = Simulation(
        algorithm, dense(), network, seed=7, cohort=cohort or "all", executor=executor_for(CPU)
    )
    how = compiled.prepare(rounds)
    for _ in range(rounds):
        plain.step()
        compiled.step()
    assert_close(compiled.models, plain.models)
    assert compiled.traffic == plain.traffic
    assert compiled.work == plain.work
    return how, compiled


@pytest.mark.parametrize(("algorithm", "network"), METHODS)
def test_compiled_rounds_are_the_same_rounds(algorithm, network, always, without_compiler) -> None:
    how, _ = both(algorithm, network)
    assert how.startswith("all nodes stacked, compiled; prepared in")


def privately(algorithm, network, rounds: int = 4) -> str:
    """Compiled rounds with private gradients, compared with plain ones; how they were run."""

    def simulation(**options) -> Simulation:
        release = Release(0.5, 0.8, counted_noise(7))
        problem = dense(sampling="poisson").protected(release)
        return Simulation(algorithm, problem, network, seed=7, **options)

    plain, compiled = simulation(), simulation(executor=executor_for(CPU))
    how = compiled.prepare(rounds)
    for _ in range(rounds):
        plain.step()
        compiled.step()
    assert_close(compiled.models, plain.models)
    assert compiled.counters.accesses == plain.counters.accesses
    return how


@pytest.mark.parametrize(("algorithm", "network"), METHODS[1:3])
def test_private_rounds_have_the_same_noise_and_are_counted(
    algorithm, network, always, without_compiler
) -> None:
    assert "compiled; prepared in" in privately(algorithm, network)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_private_rounds_with_a_real_compiler(always) -> None:
    assert "compiled; prepared in" in privately(*METHODS[1])


def test_cohorts_change_from_round_to_round(always, without_compiler) -> None:
    how, _ = both(hf.SCAFFOLD(lr=0.05, local_steps=2), STAR, cohort=2)
    assert "compiled" in how


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("algorithm", "network"), METHODS)
def test_with_a_real_compiler(algorithm, network, always) -> None:
    how, _ = both(algorithm, network)
    assert how.startswith("all nodes stacked, compiled; prepared in")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_was_compiled_before_is_found_on_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, found = torch.arange(5.0), counters["inductor"]["fxgraph_cache_hit"]
    for _ in range(2):
        [result] = tracing.compiled(lambda x: [x.sin() + 1])(x)
        assert_close(result, x.sin() + 1)
    assert counters["inductor"]["fxgraph_cache_hit"] == found + 1


def test_a_broken_compiler_does_no_harm(always, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile", broken)
    how, _ = both(*METHODS[1])
    assert how == "all nodes stacked, step by step, as rounds cannot be compiled: no compiler here"


def test_a_program_is_forgotten_when_the_next_one_fails(always, monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)
    _, compiled = both(*METHODS[1])

    def broken(*_):
        raise RuntimeError("division by zero")

    monkeypatch.setattr("holdfast.engines.simulate.programs.FusedRound", broken)
    assert "cannot be compiled: division by zero" in compiled.prepare(2)
    plain = Simulation(METHODS[1][0], dense(), METHODS[1][1], seed=7)
    for _ in range(6):
        plain.step()
    for simulation in (plain, compiled):
        simulation.step()
    assert_close(compiled.models, plain.models)


def test_rounds_that_look_at_values_run_step_by_step(always, without_compiler) -> None:
    how, _ = both(hf.Scaffnew(lr=0.05, p=0.3), STAR)
    assert "cannot be compiled: a data-dependent decision" in how


@pytest.mark.slow
def test_short_runs_are_not_compiled_and_long_ones_are(without_compiler) -> None:
    algorithm = hf.FedAvg(lr=0.05, local_steps=5)
    work = 5 * NODES * 16 * dense().dim
    for rounds, expected in ((2e12 // work - 1, False), (2e12 // work + 1, True)):
        simulation = Simulation(algorithm, dense(), STAR, seed=7, executor=executor_for(CPU))
        assert ("compiled" in simulation.prepare(int(rounds))) == expected


def test_a_resumed_run_is_run_as_before(always, without_compiler, monkeypatch) -> None:
    algorithm, network = METHODS[2]
    _, whole = both(algorithm, network, 8)
    _, half = both(algorithm, network, 4)
    tensors, counters = half.snapshot()
    rest = Simulation(algorithm, dense(), network, seed=7, executor=executor_for(CPU))
    rest.restore(tensors, counters)
    monkeypatch.setattr(
        "holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 8 * 5 * NODES * 16 * dense().dim
    )
    assert "compiled" in rest.prepare(4)  # the eight rounds of the whole run count
    for _ in range(4):
        rest.step()
    assert torch.equal(rest.models, whole.models)


def test_a_users_own_method_is_run_like_ours(always, without_compiler) -> None:
    how, _ = both(SignDescent(lr=0.5), RING)
    assert how.startswith("all nodes stacked, compiled; prepared in")


def test_a_loss_that_does_not_declare_to_be_traceable_is_run_as_it_is(always, without_compiler) -> None:
    problem = dense().variant(loss=Annealed())
    simulation = Simulation(METHODS[0][0], problem, STAR, seed=7, executor=executor_for(CPU))
    assert simulation.prepare(10) == "all nodes stacked, step by step"
