"""What ``at(round)`` says is what is run, on every executor of a CPU; test_captured has those of a GPU."""

from __future__ import annotations

import logging

import pytest
import torch
from changing_methods import REFUSED, REPLAYED, RING, OwnMethod, name
from test_executors import assert_close, dense

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for

CPU = torch.device("cpu")
ROUNDS = 6


@pytest.fixture(autouse=True)
def every_round_is_traced(monkeypatch) -> None:
    """Users' methods too, and short runs; programs stay as they were traced."""
    monkeypatch.setattr("holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 0)
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)


def both(algorithm, network, planned: int = ROUNDS) -> tuple[Simulation, Simulation, str]:
    plain = Simulation(algorithm, dense(), network, seed=7)
    replayed = Simulation(algorithm, dense(), network, seed=7, executor=executor_for(CPU))
    how = replayed.prepare(planned)
    for _ in range(ROUNDS):
        plain.step()
        replayed.step()
    assert_close(replayed.models, plain.models)
    assert replayed.work == plain.work
    return plain, replayed, how


def ours(caplog) -> list[logging.LogRecord]:
    """What the library logged; torch's tracer logs too."""
    return [record for record in caplog.records if record.name.startswith("holdfast")]


@pytest.mark.parametrize(("algorithm", "network"), REPLAYED, ids=[name(given[0]) for given in REPLAYED])
def test_what_at_changes_is_replayed(algorithm, network) -> None:
    _, replayed, how = both(algorithm, network)
    assert how.startswith("all nodes stacked, compiled; prepared in")
    assert replayed.executor.replay is not None


@pytest.mark.parametrize(
    ("algorithm", "network", "field"), REFUSED, ids=[name(given[0]) for given in REFUSED]
)
def test_what_cannot_be_replayed_is_named_and_run_step_by_step(algorithm, network, field, caplog) -> None:
    plain, replayed, how = both(algorithm, network)
    assert replayed.executor.replay is None
    assert torch.equal(replayed.models, plain.models)
    assert field in how
    [record] = ours(caplog)
    assert record.levelno == logging.WARNING
    assert f"{name(algorithm)}: rounds run step by step: " in record.message
    assert field in record.message


class CoolingLate(OwnMethod):
    """Becomes another method after the rounds that were planned."""

    def at(self, round: int) -> OwnMethod:
        return self if round < 3 else OwnMethod(lr=self.lr / round)


class AnotherWord(OwnMethod):
    """Changes a word then."""

    def at(self, round: int) -> OwnMethod:
        return AnotherWord(self.lr, order="heavy ball" if round < 3 else "plain")


@pytest.mark.parametrize(
    ("algorithm", "field"),
    [(CoolingLate(lr=0.1), "CoolingLate"), (AnotherWord(lr=0.1), "AnotherWord.order")],
    ids=["class", "word"],
)
def test_a_change_that_was_not_planned_ends_the_replay(algorithm, field, caplog) -> None:
    _, replayed, how = both(algorithm, RING, planned=3)
    assert "compiled" in how
    assert replayed.executor.replay is None
    [record] = ours(caplog)
    assert field in record.message


def test_a_schedule_that_returns_nonsense_is_told_when_its_round_comes() -> None:
    algorithm = hf.FedDyn(alpha=1.0, lr=lambda round: 0.1 if round < 2 else float("nan"))
    simulation = Simulation(algorithm, dense(), hf.server(5), seed=7, executor=executor_for(CPU))
    assert "compiled; prepared" in simulation.prepare(6)
    simulation.step()
    simulation.step()
    with pytest.raises(hf.HoldfastError, match=r"FedDyn.lr at round 2: .* got nan"):
        simulation.step()


def test_a_mistake_in_a_method_is_not_taken_for_a_reason_to_fall_back() -> None:
    class Mistaken(OwnMethod):
        def round(self, s, oracle, peers):
            return {}["no such key"]

    with pytest.raises(KeyError, match="no such key"):
        Simulation(Mistaken(lr=0.1), dense(), RING, seed=7, executor=executor_for(CPU)).prepare(3)
