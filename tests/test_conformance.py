"""The battery that every registered algorithm passes. A new one joins by being listed in ``CASES``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.algorithms.base import Method
from holdfast.algorithms.schedules import constant, halving
from holdfast.api import as_network
from holdfast.data import DATASETS
from holdfast.engines.simulate.dry_run import dry_run
from holdfast.engines.simulate.simulation import Simulation
from holdfast.models import MODELS
from holdfast.objective.flat import FlatModel
from holdfast.objective.losses import CrossEntropy
from holdfast.objective.model_objective import ModelObjective
from holdfast.tree import leaves

NODES = 5


class Case(NamedTuple):
    """A method with working hyperparameters, where it runs, and what it should send and compute."""

    name: str
    options: dict
    vectors: int  # per directed link and round; for a server up + down, per client
    gradients: int  # per node and round
    server: bool = False


CASES = [
    Case("dsgd", {}, 1, 1),
    Case("dsgd", {"order": "atc"}, 1, 1),
    Case("gossip", {"local_steps": 3}, 1, 3),
    Case("d-scaffold", {"local_steps": 3}, 2, 3),
    Case("d-scaffold", {"local_steps": 3, "naive": True}, 2, 3),
    Case("gecl", {"alpha": 0.1}, 2, 1),
    Case("local-gecl", {"local_steps": 3}, 2, 3),
    Case("local-gecl", {"local_steps": 3, "alpha": 0.1, "warm_start_rounds": 2}, 2, 3),
    Case("local-gecl-server", {"local_steps": 3}, 2, 3, server=True),
    Case("fedavg", {"local_steps": 3}, 2, 3, server=True),
    Case("fedprox", {"local_steps": 3}, 2, 3, server=True),
    Case("scaffold", {"local_steps": 3}, 4, 3, server=True),
    Case("scaffold", {"local_steps": 3, "option": 1}, 4, 4, server=True),
    Case("gt-sgd", {}, 2, 1),
    Case("gt-sgd", {"order": "atc"}, 2, 1),
    Case("net-fleet", {"local_steps": 3}, 2, 3),
    Case("dsgt", {"local_steps": 3}, 2, 4),
    Case("k-gt", {"local_steps": 3, "server_lr": 0.8}, 2, 3),
    Case("pd-sgdm", {"local_steps": 3, "momentum": 0.5}, 1, 3),
    Case("vrl-sgd", {"local_steps": 3}, 2, 3, server=True),
    Case("fedlin", {"local_steps": 3}, 4, 4, server=True),
]


def case_id(case: Case) -> str:
    return " ".join([case.name, *(f"{key}={value}" for key, value in case.options.items())])


every_case = pytest.mark.parametrize("case", CASES, ids=case_id)


def method(case: Case, lr=0.05) -> Method:
    return ALGORITHMS.build(case.name, {"lr": lr, **case.options})


def network(case: Case) -> hf.Network:
    return as_network(None if case.server else hf.ring(NODES), NODES)


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def objective(request) -> ModelObjective:
    """Minibatches of digits on unlike nodes."""
    digits = DATASETS.build("digits", {})
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=NODES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("mlp", {"hidden": [12]}, input_shape=digits.input_shape, outputs=10)
    flat = FlatModel(model, torch.device("cpu"), request.param)
    return ModelObjective(flat, CrossEntropy(), data, batch_size=16, seed=7)


def simulate(case: Case, objective: ModelObjective, rounds: int, lr=0.05) -> Simulation:
    simulation = Simulation(method(case, lr), objective, network(case), seed=7)
    for _ in range(rounds):
        simulation.step()
    return simulation


def same_state(first: Simulation, second: Simulation) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(first.state), leaves(second.state), strict=True))


def test_every_registered_algorithm_is_listed():
    assert {case.name for case in CASES} == set(ALGORITHMS)


@every_case
def test_shapes_and_dtypes_stay(case, objective):
    simulation = simulate(case, objective, 0)
    before = [(tensor.shape, tensor.dtype) for tensor in leaves(simulation.state)]
    simulation.step()
    assert [(tensor.shape, tensor.dtype) for tensor in leaves(simulation.state)] == before
    assert simulation.models.shape == (NODES, objective.dim)
    assert all(dtype == objective.x0.dtype for _, dtype in before)


@every_case
def test_training_lowers_the_common_objective(case, objective):
    simulation = simulate(case, objective, 90 // case.gradients, lr=0.1)
    start = objective.global_value(objective.x0)
    assert objective.global_value(simulation.models.mean(0)) < 0.9 * start


@every_case
def test_the_same_seed_gives_the_same_bits(case, objective):
    other = simulate(CASES[0], objective, 2)  # another run in between must not matter
    first, second = simulate(case, objective, 4), simulate(case, objective, 4)
    assert same_state(first, second)
    assert other.round == 2


@every_case
def test_rounds_do_not_change_what_they_were_given(case, objective):
    """States are values: a round makes a new one, but for the client rows that a server method keeps once."""
    simulation = simulate(case, objective, 2)
    x0 = objective.x0.clone()
    before = None if case.server else [tensor.clone() for tensor in leaves(simulation.state)]
    state = simulation.state
    simulation.step()
    assert torch.equal(objective.x0, x0)
    if before is not None:
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))


@every_case
def test_resuming_changes_nothing(case, objective):
    whole = simulate(case, objective, 6)
    half = simulate(case, objective, 3)
    tensors, counters = half.snapshot()
    half.step()  # going on must not reach into the snapshot
    resumed = simulate(case, objective, 0)
    resumed.restore(tensors, counters)
    for _ in range(3):
        resumed.step()
    assert same_state(whole, resumed)
    assert resumed.payload_bytes == whole.payload_bytes
    assert resumed.work == whole.work


@every_case
def test_traffic_and_gradients_are_what_the_paper_says(case, objective):
    simulation = simulate(case, objective, 0)
    at_start, gradients = simulation.traffic.numbers, simulation.work.gradient_evaluations
    for _ in range(3):
        simulation.step()
    links = NODES if case.server else 2 * NODES  # a ring has two directed links per node
    assert simulation.traffic.numbers - at_start == 3 * case.vectors * links * objective.dim
    assert simulation.work.gradient_evaluations - gradients == 3 * case.gradients * NODES


@every_case
def test_the_dry_run_predicts_the_traffic(case, objective):
    footprint = dry_run(method(case), network(case))
    simulation = simulate(case, objective, 4)
    vectors = footprint.vectors_at_start + 4 * footprint.vectors_per_round
    numbers = vectors * objective.dim + 4 * footprint.scalars_per_round
    assert simulation.payload_bytes == numbers * objective.x0.element_size()


@every_case
def test_step_sizes_may_be_schedules(case, objective):
    assert same_state(simulate(case, objective, 4), simulate(case, objective, 4, lr=constant(0.05)))
    halved = simulate(case, objective, 4, lr=halving(0.05, every=2))
    assert same_state(simulate(case, objective, 2), simulate(case, objective, 2, lr=halving(0.05, every=2)))
    assert not same_state(simulate(case, objective, 4), halved)


@every_case
def test_a_step_size_may_be_any_function_of_the_round(case, objective):
    def bad(round: int) -> float:
        return 0.05 if round < 2 else float("nan")

    with pytest.raises(hf.HoldfastError, match=r"lr at round 2: .* got nan"):
        simulate(case, objective, 3, lr=bad)
