"""The battery that every registered algorithm passes. A new one joins by being listed in ``CASES``."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from conftest import make_quadratics

import holdfast as hf
from holdfast.algorithms import ALGORITHMS
from holdfast.api import as_network
from holdfast.contract import Method
from holdfast.contract.parameters import constant, halving
from holdfast.core.tree import leaves
from holdfast.core.validation import parameters
from holdfast.data import DATASETS
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.simulation import Simulation
from holdfast.models import MODELS
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.problem import Problem

NODES = 5
THREE_STEPS = {"name": "sgd", "lr": 0.1, "steps": 3}  # inexact local solves, so that costs are known


class Case(NamedTuple):
    """A method with working hyperparameters, where it runs, and what it should send and compute."""

    name: str
    options: dict
    vectors: int  # per directed link and round; for a server up + down, per client
    gradients: int  # per node and round
    server: bool = False
    rate: str | None = "lr"  # the hyperparameter that the battery sets and makes a schedule of
    scalars: int = 0  # single numbers sent per link or client and round beside the vectors


CASES = [
    Case("dsgd", {}, 1, 1),
    Case("dsgd", {"order": "atc"}, 1, 1),
    Case("gossip", {"local_steps": 3}, 1, 3),
    Case("d-scaffold", {"local_steps": 3}, 2, 3),
    Case("d-scaffold", {"local_steps": 3, "naive": True}, 2, 3),
    Case("gecl", {}, 2, 1),
    Case("gecl", {"alpha": 0.1}, 2, 1),
    Case("local-gecl", {"local_steps": 3}, 2, 3),
    Case("local-gecl", {"local_steps": 3, "alpha": 0.1, "warm_start_rounds": 2}, 2, 3),
    Case("local-gecl-server", {"local_steps": 3}, 2, 3, server=True),
    Case("fedavg", {"local_steps": 3}, 2, 3, server=True),
    Case("fedprox", {"local_steps": 3}, 2, 3, server=True),
    Case("fedprox", {"local_steps": 3, "reduced": True}, 2, 5, server=True),
    Case("scaffold", {"local_steps": 3}, 4, 3, server=True),
    Case("scaffold", {"local_steps": 3, "option": 1}, 4, 4, server=True),
    Case("scallion", {"local_steps": 3, "alpha": 0.5}, 3, 3, server=True),
    Case("scafcom", {"local_steps": 3, "beta": 0.5}, 3, 3, server=True),
    Case("a-fedpd", {"eta": 0.5, "local_steps": 3}, 4, 3, server=True),
    Case("tamuna", {"p": 1.0, "copies": 3}, 3, 1, server=True),
    Case("gt-sgd", {}, 2, 1),
    Case("gt-sgd", {"order": "atc"}, 2, 1),
    Case("net-fleet", {"local_steps": 3}, 2, 3),
    Case("dsgt", {"local_steps": 3}, 2, 4),
    Case("k-gt", {"local_steps": 3, "server_lr": 0.8}, 2, 3),
    Case("flexgt", {"local_steps": 3, "exchanges": 2}, 4, 3),
    Case("beer", {}, 2, 1),
    Case("motef", {"share": 0.5}, 2, 1),
    Case("exact-diffusion", {}, 1, 1),
    Case("exact-diffusion", {"share": 1.0}, 1, 1),
    Case("extra", {}, 1, 1),
    Case("nids", {"l1": 1e-4}, 1, 1),
    Case("led", {"local_steps": 3}, 1, 3),
    Case("qg-dsgdm", {"momentum": 0.5}, 1, 1),
    Case("d-scaffnew", {"p": 1.0}, 1, 1),
    Case("fedcm", {"local_steps": 3, "alpha": 0.5}, 3, 3, server=True),
    Case("diloco", {"local_steps": 3}, 2, 3, server=True),
    Case("noloco", {"local_steps": 3}, 2, 3),
    Case("pd-sgdm", {"local_steps": 3, "momentum": 0.5}, 1, 3),
    Case("vrl-sgd", {"local_steps": 3}, 2, 3, server=True),
    Case("fedlin", {"local_steps": 3}, 4, 4, server=True),
    Case("dspodfl", {}, 1, 1),
    Case("ecl", {"local_steps": 3}, 1, 3),
    Case("pdmm", {"gamma": 1.0, "solver": THREE_STEPS}, 1, 3, rate="gamma"),
    Case("fedpd", {"eta": 0.5, "local_steps": 3}, 2, 3, server=True),
    Case("fedpd", {"eta": 0.5, "solver": "vr", "local_steps": 2, "refresh_every": 1}, 2, 5, True, rate="eta"),
    Case("feddyn", {"alpha": 1.0, "local_steps": 3}, 2, 3, server=True),
    Case("feddr", {"eta": 1.0, "solver": THREE_STEPS}, 2, 3, server=True, rate="eta"),
    Case("fedsplit", {"eta": 1.0, "solver": THREE_STEPS}, 2, 3, server=True, rate="eta"),
    Case("feddualavg", {"local_steps": 3, "l2": 1e-3}, 2, 3, server=True, scalars=1),
    Case("scaffnew", {"p": 1.0}, 2, 1, server=True),
    Case(
        "apda-inexact",
        {"lr": 1.0, "beta": 0.5, "mu": 0.0, "dual_lr": 0.3, "solver": THREE_STEPS},
        2,
        4,
        server=True,
    ),
    Case("5gcs", {"lr": 1.0, "mu": 0.01, "solver": THREE_STEPS}, 2, 4, server=True),
    Case("ditto", {"local_steps": 2}, 2, 3, server=True),
    Case("fedrep", {"head": 3, "local_steps": 4}, 1, 5, scalars=-3),
    Case("fedbn", {"local": 3, "local_steps": 4}, 1, 4, scalars=-3),
    Case("dualfl", {"nu": 0.02, "alpha": 0.02, "solver": THREE_STEPS}, 2, 3, server=True, rate=None),
]
MOMENTUM = {"name": "momentum", "beta": 0.5, "keep": True}


def with_momentum(cases: list[Case]) -> list[Case]:
    """Every method with a local optimiser once more, with one that keeps something: it costs no traffic."""
    first = {case.name: case for case in reversed(cases)}.values()
    able = [case for case in first if "optimizer" in parameters(ALGORITHMS[case.name])]
    return [case._replace(options={**case.options, "optimizer": MOMENTUM}) for case in able]


CASES += with_momentum(CASES)


def case_id(case: Case) -> str:
    return " ".join([case.name, *(f"{key}={value}" for key, value in case.options.items())])


every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
exactly = pytest.mark.parametrize("problem", ["quadratics float64"], indirect=True)
with_minibatches = pytest.mark.parametrize("problem", ["digits float32"], indirect=True)


def method(case: Case, rate=None) -> Method:
    """The method with its step size, or whatever plays that part, set to ``rate``."""
    if case.rate is None:
        return ALGORITHMS.build(case.name, case.options)
    default = case.options.get(case.rate, 0.05)
    return ALGORITHMS.build(case.name, {**case.options, case.rate: default if rate is None else rate})


RING, STAR = as_network(hf.ring(NODES), NODES), as_network(None, NODES)


def network(case: Case) -> hf.Network:
    return STAR if case.server else RING


@pytest.fixture(scope="module")
def problem(request) -> Problem:
    """Minibatches of digits on heterogeneous nodes, or exact gradients of heterogeneous quadratics."""
    if request.param.startswith("quadratics"):
        return make_quadratics(NODES, L=2.0)
    dtype = torch.float32 if request.param.endswith("32") else torch.float64
    digits = DATASETS.build("digits", {})
    data = hf.partition(digits.x_train, digits.y_train, hf.Dirichlet(0.5), nodes=NODES, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("mlp", {"hidden": [12]}, input_shape=digits.input_shape, outputs=10)
    flat = FlatModel(model, torch.device("cpu"), dtype)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=16, seed=7)


def simulate(case: Case, problem: Problem, rounds: int, rate=None) -> Simulation:
    simulation = Simulation(method(case, rate), problem, network(case), seed=7)
    for _ in range(rounds):
        simulation.step()
    return simulation


def same_state(first: Simulation, second: Simulation) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(first.state), leaves(second.state), strict=True))


def test_every_registered_algorithm_is_listed():
    unlisted = {case.name for case in CASES} ^ set(ALGORITHMS)
    assert not unlisted, "CASES in this file has a Case for each method, and no other"


def test_momentum_is_tried_with_every_method_that_has_local_steps():
    tried = {case.name for case in CASES if "optimizer" in case.options}
    steps = {case.name for case in CASES if "local_steps" in case.options}
    others = {"feddualavg", "pd-sgdm", "fedcm"}  # steps on the dual, momentum of their own
    one_step = {"dsgd", "gecl", "gt-sgd", "dspodfl", "scaffnew", "d-scaffnew"}
    assert tried == steps - others | one_step, (
        "add the method to `others` if it has local_steps and takes no optimizer, "
        "to `one_step` if it takes an optimizer and has no local_steps"
    )


@every_case
@pytest.mark.parametrize("problem", ["digits float32", "digits float64"], indirect=True)
def test_shapes_and_dtypes_stay(case, problem):
    simulation = simulate(case, problem, 0)
    before = [(tensor.shape, tensor.dtype) for tensor in leaves(simulation.state)]
    simulation.step()
    assert [(tensor.shape, tensor.dtype) for tensor in leaves(simulation.state)] == before
    assert simulation.models.shape == (NODES, problem.dim)
    assert all(dtype == problem.x0.dtype for _, dtype in before)


def lowers_the_common_objective(case: Case, problem: Problem, gradients: int) -> bool:
    simulation = simulate(case, problem, gradients // case.gradients)
    return problem.global_value(simulation.models.mean(0)) < 0.9 * problem.global_value(problem.x0)


@every_case
@exactly
def test_training_lowers_the_common_objective(case, problem):
    assert lowers_the_common_objective(case, problem, gradients=60)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.slow] if "optimizer" in c.options else []) for c in CASES],
    ids=case_id,
)
@with_minibatches
def test_training_lowers_the_common_objective_of_a_model(case, problem):
    assert lowers_the_common_objective(case, problem, gradients=180)


@every_case
@exactly
def test_rounds_do_not_change_what_they_were_given(case, problem):
    """States are values: a round makes a new one, but for the client rows that a server method keeps once."""
    simulation = simulate(case, problem, 2)
    x0 = problem.x0.clone()
    before = None if case.server else [tensor.clone() for tensor in leaves(simulation.state)]
    state = simulation.state
    simulation.step()
    assert torch.equal(problem.x0, x0)
    if before is not None:
        assert all(torch.equal(a, b) for a, b in zip(before, leaves(state), strict=True))


@every_case
@with_minibatches
def test_the_same_seed_gives_the_same_bits_and_resuming_changes_nothing(case, problem):
    whole = simulate(case, problem, 6)
    other = simulate(CASES[0], problem, 2)  # another run in between must not matter
    half = simulate(case, problem, 3)
    assert other.round == 2
    tensors, counters = half.snapshot()
    half.step()  # going on must not reach into the snapshot
    resumed = simulate(case, problem, 0)
    resumed.restore(tensors, counters)
    for _ in range(3):
        resumed.step()
    assert same_state(whole, resumed)
    assert resumed.payload_bytes == whole.payload_bytes
    assert resumed.work == whole.work


@every_case
@exactly
def test_traffic_and_gradients_are_what_the_paper_says(case, problem):
    simulation = simulate(case, problem, 0)
    at_start, gradients = simulation.traffic.numbers, simulation.work.gradient_evaluations
    for _ in range(3):
        simulation.step()
    links = NODES if case.server else 2 * NODES  # a ring has two directed links per node
    numbers = case.vectors * problem.dim + case.scalars
    assert simulation.traffic.numbers - at_start == 3 * links * numbers
    assert simulation.work.gradient_evaluations - gradients == 3 * case.gradients * NODES


@every_case
@exactly
def test_the_dry_run_predicts_the_traffic(case, problem):
    footprint = dry_run(method(case), network(case))
    simulation = simulate(case, problem, 4)
    vectors = footprint.vectors_at_start + 4 * footprint.vectors_per_round
    numbers = vectors * problem.dim + 4 * footprint.scalars_per_round
    assert simulation.payload_bytes == numbers * problem.x0.element_size()


scheduled_cases = pytest.mark.parametrize("case", [case for case in CASES if case.rate], ids=case_id)


# The engine evaluates schedules before a round: the objective never sees them.
@exactly
@scheduled_cases
def test_step_sizes_may_be_schedules(case, problem):
    start = case.options.get(case.rate, 0.05)
    rates = (None, constant(start), halving(start, every=2))
    number, same, halved = (simulate(case, problem, 2, rate) for rate in rates)
    assert same_state(number, halved)
    for simulation in (number, same, halved):
        simulation.step()
        simulation.step()
    assert same_state(number, same)
    assert not same_state(number, halved)


@exactly
@scheduled_cases
def test_a_schedule_that_returns_nonsense_is_named_with_its_round(case, problem):
    def bad(round: int) -> float:
        return 0.05 if round < 2 else float("nan")

    with pytest.raises(hf.HoldfastError, match=rf"{case.rate} at round 2: .* got nan"):
        simulate(case, problem, 3, bad)
