"""Privacy of whole nodes: messages clipped and noised, counted as dp-accounting counts them."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.randomness import poisson_cohort
from holdfast.engines.common.dry_run import planned_messages
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.spec import Objective
from holdfast.privacy.ledger import Ledger, protection
from holdfast.privacy.messages import COUNT_NOISE, PrivateMessages
from holdfast.problem.problem import FunctionProblem

NODES, DIM = 6, 5


def budget(**changes) -> hf.NodeDP:
    return hf.NodeDP(**{"epsilon": 4.0, "delta": 1e-3, "clip": 1.0, **changes})


def simulation(given: hf.NodeDP, multiplier: float, nodes: int = NODES, **options) -> Simulation:
    """Gradient of node i: (i + 1) times the unit vector; one step of 1, so its message has norm i + 1."""
    direction = torch.full((DIM,), 1 / math.sqrt(DIM), dtype=torch.float64)
    functions = [lambda x, i=i: -(i + 1) * (x * direction).sum() for i in range(nodes)]
    problem = FunctionProblem(functions, torch.zeros(DIM, dtype=torch.float64))
    cohort = options.get("cohort", "all")
    expected = nodes if cohort == "all" else cohort
    method = PrivateMessages(hf.FedAvg(lr=1.0), given, multiplier, expected, 7)
    return Simulation(method, problem, hf.server(nodes), seed=7, **options)


def test_messages_are_clipped_as_a_whole() -> None:
    run = simulation(budget(clip=2.5), 1e-9)
    run.step()
    norms = torch.tensor([1.0, 2.0, 2.5, 2.5, 2.5, 2.5])
    moved = run.models[0]
    torch.testing.assert_close(moved, torch.full((DIM,), float(norms.mean()) / math.sqrt(DIM)).double())


@pytest.mark.parametrize(("noise", "times"), [("server", 1.0), ("clients", math.sqrt(NODES))])
def test_noise_has_the_size_that_is_accounted_for(noise, times) -> None:
    run, quiet = simulation(budget(noise=noise), 3.0), simulation(budget(noise=noise), 1e-9)
    moved = []
    for _ in range(200):
        before = run.models[0].clone() - quiet.models[0]
        run.step()
        quiet.step()
        moved.append(run.models[0] - quiet.models[0] - before)
    numbers = torch.stack(moved) / (times * 3.0 * 1.0 / NODES)
    assert abs(float(numbers.std()) - 1) < 0.06
    assert abs(float(numbers.mean())) < 0.06
    assert torch.unique(numbers).numel() == numbers.numel()


def test_the_clipping_norm_finds_its_quantile() -> None:
    run = simulation(budget(clip=0.1, quantile=0.5), 1e-3, nodes=40)
    for _ in range(90):
        run.step()
    clip = float(run.state.server.clip)
    assert 15 < clip < 26  # norms are 1, 2, ..., 40


def test_what_the_count_spends_is_taken_from_the_messages() -> None:
    """Two Gaussian mechanisms on the same messages cost as much as one whose inverse variance is the sum."""
    method = PrivateMessages(hf.FedAvg(lr=1.0), budget(quantile=0.5), 1.5, 100, 0)
    count = 100 * COUNT_NOISE / 0.5  # noise over the sensitivity of a count of +-1/2
    assert method.of_messages**-2 + count**-2 == pytest.approx(1.5**-2, rel=1e-12)
    with pytest.raises(HoldfastError, match="more than a count of 10 clients bears"):
        PrivateMessages(hf.FedAvg(lr=1.0), budget(quantile=0.5), 1.5, 10, 0)


@pytest.mark.parametrize(
    ("noise", "cohort", "nodes", "rounds"),
    [(1.2, 10, 100, 20), pytest.param(None, 50, 1000, 60, marks=pytest.mark.slow)],
)
def test_poisson_cohorts_cost_what_dp_accounting_says(noise, cohort, nodes, rounds) -> None:
    asked = budget(cohorts="poisson", noise_multiplier=noise)
    planned = planned_messages(asked, nodes, cohort, rounds, seed=0)
    ledger = protection(asked, planned, np.full(nodes, nodes), cohort)
    direct = PLDAccountant()
    gaussian = dp_accounting.GaussianDpEvent(ledger.multiplier)
    direct.compose(dp_accounting.PoissonSampledDpEvent(cohort / nodes, gaussian), rounds)
    assert ledger.epsilon_of(planned) == pytest.approx(direct.get_epsilon(1e-3), rel=0.01)
    assert noise or 0.98 * 4.0 < ledger.epsilon_of(planned) <= 4.0


def test_fixed_cohorts_are_known_so_only_who_was_asked_pays_and_in_full() -> None:
    asked = budget()
    planned = planned_messages(asked, 12, 3, 8, seed=5)
    assert planned.sum() == 3 * 8
    ledger = Ledger(asked, np.full(12, 12), None, 2.0)
    run = simulation(asked, 2.0, nodes=12, cohort=3, ledger=ledger)
    run.rounds.seed = 5
    for _ in range(8):
        run.step()
    assert (ledger.accesses == planned).all()
    direct = PLDAccountant().compose(dp_accounting.GaussianDpEvent(2.0), int(planned.max()))
    assert ledger.epsilon == pytest.approx(direct.get_epsilon(1e-3), rel=0.01)


def test_poisson_cohorts_have_their_size_on_average() -> None:
    sizes = [len(poisson_cohort(3, round, 40, 4)) for round in range(300)]
    assert abs(np.mean(sizes) - 4) < 0.4
    assert abs(np.var(sizes) - 3.6) < 1.0
    ledger = Ledger(budget(cohorts="poisson"), np.full(NODES, NODES), 1, 1.0)
    run = simulation(budget(cohorts="poisson", clip=100.0), 1e-9, cohort=1, ledger=ledger)
    for _ in range(12):
        run.step()
    cohorts = [poisson_cohort(7, round, NODES, 1).tolist() for round in range(12)]
    assert [] in cohorts
    total = sum(node + 1.0 for members in cohorts for node in members)
    torch.testing.assert_close(
        run.models[0], torch.full((DIM,), total / math.sqrt(DIM)).double(), rtol=1e-6, atol=1e-6
    )
    assert (ledger.accesses == [12, 0]).all()
    assert run.traffic.numbers == 2 * DIM * sum(map(len, cohorts))


def train(algorithm, **options):
    given = {"model": "linear", "data": "digits", "nodes": 20, "rounds": 5, "progress": False}
    return hf.train(algorithm, **{**given, "private": budget(clip=0.5), **options})


@pytest.mark.slow
def test_a_run_stays_within_its_budget() -> None:
    result = train(hf.FedAvg(lr=0.1), private=budget(cohorts="poisson"), cohort=4, evaluate_every=5)
    last = result.history.rows[-1]
    assert 0.98 * 4.0 < last["epsilon"] <= 4.0
    assert result.status == "done"


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (hf.SCAFFOLD(lr=0.1), {}, "messages of SCAFFOLD tell how a client's own memory changes"),
        (hf.FedAvg(lr=0.1, normalize=True), {}, "clipping drives the two apart"),
        (hf.LocalGECL(lr=0.1), {"topology": "ring"}, "take a method that a server leads"),
        (hf.FedAvg(lr=0.1), {"aggregation": "median"}, "its noise is for the mean"),
        (hf.FedAvg(lr=0.1), {"channel": "half"}, "may make them longer than they were clipped to"),
    ],
)
def test_what_does_not_fit_is_refused(algorithm, options, message) -> None:
    with pytest.raises(HoldfastError, match=message):
        train(algorithm, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": "clients", "cohorts": "poisson"}, "a secret draw gains nothing"),
        ({"noise": "clients", "quantile": 0.5}, "use noise = 'server' or 'distributed'"),
        ({"quantile": 1.0}, "NodeDP.quantile"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(changes, message) -> None:
    with pytest.raises(HoldfastError, match=message):
        budget(**changes)


def test_files_name_what_is_protected() -> None:
    table = {"unit": "node", "epsilon": 2.0, "delta": 1e-3, "clip": 1.0, "cohorts": "poisson"}
    assert Objective.of({"private": table}).private == hf.NodeDP(
        epsilon=2.0, delta=1e-3, clip=1.0, cohorts="poisson"
    )
    assert Objective.of({"private": {"epsilon": 2.0, "delta": 1e-3, "clip": 1.0}}).private == hf.DP(
        epsilon=2.0, delta=1e-3, clip=1.0
    )
    for wrong, message in (
        ({"unit": "group"}, "unknown unit of private"),
        ({"clp": 1.0}, "unknown key in private"),
        ({"unit": "node"}, "epsilon is missing"),
    ):
        with pytest.raises(HoldfastError, match=message):
            Objective.of({"private": wrong})
