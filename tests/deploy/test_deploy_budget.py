"""A time budget for each round: a node takes as many local steps as fit, and the simulator can follow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Quadratics, make_quadratics
from federation_runs import deploy, describe, simulate, stopped

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation
from holdfast_deploy.federation_file import make_federation
from holdfast_deploy.member.pace import Pace
from holdfast_deploy.storage.results import read_steps


class Slow(Quadratics):
    """Whose gradients take a hundredth of a second or longer."""

    def minibatch_values_and_grads(self, *asked: Any) -> Any:
        time.sleep(0.01)
        return super().minibatch_values_and_grads(*asked)


def slow_pace(folder: Path, most: int = 100) -> Pace:
    four = make_quadratics(1)
    return Pace(folder, Slow(four.A, four.b), budget=0.045, most=most)


def take(pace: Pace, steps: int) -> None:
    for step in range(steps):
        pace.gradient(pace.problem.x0[None], torch.tensor([0]), 0, step)


def test_as_many_steps_as_fit_at_the_pace_of_the_round_before(tmp_path: Path) -> None:
    pace = slow_pace(tmp_path)
    assert pace.steps(1) == 1  # nothing is known yet
    take(pace, 2)
    assert 1 <= pace.steps(2) <= 4  # no step was faster than a hundredth of a second
    assert pace.steps(2) == pace.taken[2]  # however long it took since
    again = slow_pace(tmp_path)
    assert again.taken == pace.taken
    assert again.pace == pytest.approx(pace.pace, rel=1e-5)
    assert 1 <= again.steps(3) <= 4  # the pace is remembered
    assert read_steps([tmp_path / "steps.csv"]) == [[pace.taken[1]], [pace.taken[2]], [again.taken[3]]]
    capped = slow_pace(tmp_path, most=1)
    assert capped.steps(4) == 1


@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        pytest.param({"name": "local-gecl"}, {"topology": "ring"}, id="graph", marks=pytest.mark.slow),
        pytest.param({"name": "vrl-sgd"}, {"topology": "server"}, id="server"),
    ],
)
def test_the_simulator_follows_with_the_recorded_steps(
    algorithm: dict[str, Any], network: dict[str, Any], tmp_path: Path
) -> None:
    """With time enough: one step in the first round, then all four."""
    raw = describe(
        algorithm | {"lr": 0.1, "local_steps": 4},
        rounds=4,
        network=network,
        dtype="float64",
        round={"budget": "20s"},
    )
    run = deploy(raw, tmp_path)
    steps = read_steps([tmp_path / name / "steps.csv" for name in run.federation.names])
    assert steps == [[1, 1, 1], [4, 4, 4], [4, 4, 4], [4, 4, 4]]
    simulation = simulate(run.federation, steps=steps)
    for i, name in enumerate(run.federation.names):
        assert (run.models[name] - simulation.models[i]).abs().max() < 1e-12


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_steps_it_had_written_down(tmp_path: Path) -> None:
    """So little time that nobody knows how many steps fit."""
    algorithm = {"name": "local-gecl", "lr": 0.1, "local_steps": 50}
    raw = describe(algorithm, rounds=8, dtype="float64", round={"budget": 0.01})
    run = stopped(raw, tmp_path, at=4)
    run.carry_out()
    assert not run.errors, run.errors
    steps = read_steps([tmp_path / name / "steps.csv" for name in run.federation.names])
    simulation = simulate(run.federation, steps=steps)
    for i, name in enumerate(run.federation.names):
        assert (run.models[name] - simulation.models[i]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("algorithm", "rule", "complaint"),
    [
        ({"name": "gt-sgd", "lr": 0.1}, {"budget": "1s"}, "takes no local_steps"),
        ({"name": "net-fleet", "lr": 0.1}, {"budget": "1s"}, "as many local steps, as it is not known"),
        ({"name": "k-gt", "lr": 0.1}, {"quorum": 2}, "quorum and deadline go together"),
    ],
)
def test_what_cannot_be_is_refused(algorithm: dict[str, Any], rule: dict[str, Any], complaint: str) -> None:
    with pytest.raises(HoldfastError, match=complaint):
        make_federation(describe(algorithm, round=rule), "test")


def test_recorded_steps_that_cannot_be_are_refused() -> None:
    problem = make_quadratics(2)
    for method, steps, complaint in (
        (hf.SCAFFOLD(lr=0.1, local_steps=4), [[1]], "expected 2 numbers from 1 on"),
        (hf.FedCM(lr=0.1, local_steps=4), [[1, 2]], "the same for all nodes, as "),
        (hf.FedDR(eta=1.0), [[1, 2]], "takes no local_steps"),
    ):
        with pytest.raises(HoldfastError, match=complaint):
            Simulation(method, problem, hf.server(2), steps=steps)
