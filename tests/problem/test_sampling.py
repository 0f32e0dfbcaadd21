"""Client sampling: who computes, sends and changes; where it ends; and what ten thousand clients cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import Quadratics
from linear_rounds import measured_decay, reference_quadratics
from server_runs import simulate, stochastic_digits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import holdfast as hf
from holdfast.algorithms.feddyn import FedDyn
from holdfast.algorithms.fedpd import FedPD
from holdfast.core.randomness import Word
from holdfast.core.tree import leaves
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem

STATEFUL = [
    hf.SCAFFOLD(lr=0.02, local_steps=10),
    FedDyn(alpha=1 / 0.3, solver="exact"),
    FedDyn(alpha=1 / 0.3, solver="gd", lr=0.1, local_steps=4),
]
STATELESS = [
    hf.FedAvg(lr=0.05, local_steps=5),
    hf.FedAvg(lr=0.05, local_steps=5, server_lr=1.5),
    hf.FedProx(lr=0.05, local_steps=5, rho=0.1),
]


class Watched(Quadratics):
    """Quadratics that note whose gradients were asked for."""

    def __init__(self, A: Tensor, b: Tensor) -> None:
        super().__init__(A, b)
        self.computed: set[int] = set()

    def full_grads(self, x: Tensor, nodes: Tensor, round: Word = 0, step: Word = 0) -> Tensor:
        self.computed.update(nodes.tolist())
        return super().full_grads(x, nodes)


@pytest.fixture
def problem() -> Watched:
    reference = reference_quadratics(dim=6)
    return Watched(reference.A, reference.b)


def step_and_see_who_changed(simulation: Simulation) -> set[int]:
    before = [rows.clone() for rows in leaves(simulation.state.clients)]
    simulation.step()
    changed: set[int] = set()
    for old, new in zip(before, leaves(simulation.state.clients), strict=True):
        changed.update((old != new).any(-1).nonzero().flatten().tolist())
    return changed


@pytest.mark.parametrize("algorithm", STATEFUL, ids=str)
def test_only_the_cohort_computes_and_changes(problem, algorithm):
    simulation = simulate(algorithm, problem, cohort=3)
    cohorts = set()
    for _ in range(8):
        problem.computed.clear()
        changed = step_and_see_who_changed(simulation)  # all other rows are the same, bit by bit
        assert len(changed) == 3
        assert changed == problem.computed
        cohorts.add(tuple(changed))
    assert len(cohorts) > 4


@pytest.mark.parametrize("algorithm", STATELESS, ids=str)
def test_only_the_cohort_computes(problem, algorithm):
    simulation = simulate(algorithm, problem, cohort=3)
    for _ in range(8):
        problem.computed.clear()
        simulation.step()
        assert len(problem.computed) == 3


@pytest.mark.parametrize(
    ("algorithm", "vectors", "gradients"),
    [
        (hf.FedAvg(lr=0.05, local_steps=5), 2, 5),
        (hf.FedProx(lr=0.05, local_steps=5), 2, 5),
        (hf.SCAFFOLD(lr=0.02, local_steps=10), 4, 10),
        (hf.SCAFFOLD(lr=0.02, local_steps=10, option=1), 4, 11),
        (FedDyn(alpha=1.0, lr=0.1, local_steps=4), 2, 4),
    ],
    ids=str,
)
def test_only_the_cohort_is_counted(problem, algorithm, vectors, gradients):
    simulation = simulate(algorithm, problem, rounds=5, cohort=3)
    assert simulation.traffic.numbers == 5 * 3 * vectors * problem.dim
    assert simulation.work.gradient_evaluations == 5 * 3 * gradients
    assert simulation.work.sample_gradients == 5 * 3 * gradients  # every node has one sample here


def test_every_client_is_drawn_as_often_as_the_others(problem):
    simulation = simulate(hf.SCAFFOLD(lr=0.001), problem, cohort=3)
    drawn = np.zeros(10)
    for _ in range(300):
        drawn[list(step_and_see_who_changed(simulation))] += 1
    assert drawn.sum() == 900
    assert np.abs(drawn - 90).max() < 4 * np.sqrt(300 * 0.3 * 0.7)


KNOWN = [  # factor per round of an independent implementation with cohorts of its own, and their spread
    (hf.SCAFFOLD(lr=0.02, local_steps=10), 0.835, 0.03),
    (FedDyn(alpha=1 / 0.3, solver="exact"), 0.885, 0.03),
]


@pytest.mark.parametrize(("algorithm", "factor", "spread"), KNOWN, ids=str)
def test_corrected_methods_reach_the_optimum_with_three_clients_of_ten(problem, algorithm, factor, spread):
    path = problem.run(algorithm, 350, cohort=3)
    assert (path[-1] - problem.optimum).norm(dim=-1).max() < 1e-10
    assert measured_decay(problem, path) == pytest.approx(factor, abs=spread)


@pytest.mark.parametrize("algorithm", STATELESS, ids=str)
def test_methods_without_correction_learn_with_cohorts(algorithm):
    objective = stochastic_digits()
    simulation = simulate(algorithm, objective, rounds=40, cohort=3)
    assert objective.global_value(simulation.models[0]) < 0.6 * objective.global_value(objective.x0)


@pytest.mark.parametrize("algorithm", STATEFUL + STATELESS, ids=str)
def test_a_cohort_of_everybody_is_no_cohort(problem, algorithm):
    assert torch.equal(problem.run(algorithm, 10, cohort=10), problem.run(algorithm, 10))


def test_a_cohort_is_the_same_for_every_method_and_another_for_another_seed(problem):
    def cohorts(algorithm, seed):
        simulation = simulate(algorithm, problem, seed=seed, cohort=3)
        return [step_and_see_who_changed(simulation) for _ in range(6)]

    assert cohorts(STATEFUL[0], 3) == cohorts(STATEFUL[1], 3) != cohorts(STATEFUL[0], 4)


@pytest.mark.parametrize("algorithm", STATEFUL + STATELESS, ids=str)
def test_resuming_draws_the_same_cohorts(problem, algorithm):
    whole, half = (
        simulate(algorithm, problem, rounds=8, cohort=3),
        simulate(algorithm, problem, rounds=3, cohort=3),
    )
    snapshot = half.snapshot()
    half.step()  # going on must not reach into the snapshot
    resumed = simulate(algorithm, problem, cohort=3)
    resumed.restore(*snapshot)
    for _ in range(5):
        resumed.step()
    assert all(torch.equal(a, b) for a, b in zip(leaves(whole.state), leaves(resumed.state), strict=True))
    assert (resumed.payload_bytes, resumed.work) == (whole.payload_bytes, whole.work)


@pytest.mark.parametrize(
    "algorithm", [FedPD(eta=0.1, lr=0.1), hf.LocalGECLServer(lr=0.1), hf.LocalGECL(lr=0.1)], ids=str
)
def test_methods_that_need_everybody_refuse_cohorts(problem, algorithm):
    name = type(algorithm).__name__
    with pytest.raises(hf.HoldfastError, match=rf"^cohort: {name} needs every node in every round"):
        hf.minimize(problem.functions, problem.x0, algorithm, 1, cohort=3)


@pytest.mark.parametrize("size", [11, 0, -1])
def test_a_cohort_that_cannot_be_drawn(problem, size):
    message = rf"^cohort: should be .*\b1\b.*, got {size}$"
    with pytest.raises(hf.HoldfastError, match=message):
        hf.minimize(problem.functions, problem.x0, hf.FedAvg(lr=0.1), 1, cohort=size)


# --- client state is kept once -------------------------------------------------------------------------


class Twice(NamedTuple):
    kept: Tensor
    replaced: Tensor


class KeepsItsStart(hf.FedAvg):
    """A client state that is the initial model, twice."""

    def init(self, x0):
        return Twice(kept=x0, replaced=x0)

    def client(self, s, received, oracle):
        return Twice(kept=s.kept, replaced=s.replaced + 1), torch.zeros_like(s.kept)


@pytest.mark.parametrize("nodes", [1, 4])
def test_rows_put_back_in_place_reach_nothing_else(nodes):
    objective = ZeroProblem(nodes)
    simulation = simulate(KeepsItsStart(lr=0.1), objective, cohort=1, rounds=1)
    assert simulation.state.clients.kept.tolist() == [[0.0]] * nodes
    assert sorted(simulation.state.clients.replaced.flatten().tolist()) == [0.0] * (nodes - 1) + [1.0]
    assert objective.x0.tolist() == [0.0]


class NewTensors(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes, views and results in place not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in leaves_of(args)}
        fresh = [t for t in leaves_of([result]) if t.untyped_storage().data_ptr() not in given]
        self.sizes.extend(t.untyped_storage().nbytes() for t in fresh)
        return result


def leaves_of(values) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(leaves_of(value))
    return found


def softmax_regression(clients: int) -> ModelProblem:
    """784-10, two random images for every client."""
    rng = np.random.default_rng(0)
    x, y = rng.random((2 * clients, 784), dtype=np.float32), rng.integers(0, 10, 2 * clients)
    with torch.random.fork_rng():
        model = MODELS.build("linear", {}, input_shape=(784,), outputs=10)
    data = hf.FederatedData(x, y, np.full(clients, 2))
    flat = FlatModel(model, torch.device("cpu"), torch.float32)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=8, seed=0)


def test_ten_thousand_clients_keep_their_state_once():
    """A round with 50 of 10,000 clients makes no larger tensor than one with 50 of 50."""
    algorithm = hf.SCAFFOLD(lr=0.1, local_steps=2)
    few, many = softmax_regression(50), softmax_regression(10_000)
    all_states = 10_000 * 7850 * 4
    with NewTensors() as at_start:
        simulation = simulate(algorithm, many, cohort=50)
    assert [size for size in at_start.sizes if size > all_states / 10] == [all_states]
    place = simulation.state.clients.c.data_ptr()
    with NewTensors() as of_many:
        simulation.step()
    with NewTensors() as of_few:
        simulate(algorithm, few, cohort=50, rounds=1)
    assert max(of_many.sizes) == max(of_few.sizes) < all_states / 100
    assert simulation.state.clients.c.data_ptr() == place
    assert int((simulation.state.clients.c != 0).any(-1).sum()) == 50
