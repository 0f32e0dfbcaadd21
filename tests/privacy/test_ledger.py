"""The ledger: what accesses cost, which noise a plan needs, and that training ends with the budget."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.stats import binom, norm
from test_conformance import CASES, case_id, method, network

import holdfast as hf
from holdfast.api import as_network
from holdfast.core.errors import HoldfastError
from holdfast.core.world import World
from holdfast.engines.common.dry_run import planned_accesses
from holdfast.experiments.plan import Plan
from holdfast.privacy import Ledger, protection
from holdfast.privacy.ledger import epsilon_of

BUDGET = hf.DP(epsilon=3.0, delta=1e-5, clip=1.0)


@pytest.mark.parametrize(
    ("sigma", "rate", "minibatches", "of_all_data"),
    [
        (1.0, 0.01, 1000, 0),
        (0.6, 0.001, 3000, 0),
        (5.0, 0.2, 400, 0),
        (20.0, 1.0, 0, 50),
        (8.0, 0.1, 300, 7),
        (0.8, 0.1, 150, 0),  # an epsilon of 13
        (0.8, 0.1, 600, 0),  # of 29
    ],
)
def test_epsilon_is_that_of_dp_accounting(sigma, rate, minibatches, of_all_data) -> None:
    direct, gaussian = PLDAccountant(), dp_accounting.GaussianDpEvent(sigma)
    if minibatches:
        direct.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), minibatches)
    if of_all_data:
        direct.compose(gaussian, of_all_data)
    ours = epsilon_of(sigma, 1e-5, rate, minibatches, of_all_data)
    assert ours == pytest.approx(direct.get_epsilon(1e-5), rel=0.01)


@pytest.mark.parametrize("epsilon", [1.0, 2.0, 4.0])
def test_a_draw_that_fills_the_rows_costs_its_probability_and_no_more(epsilon) -> None:
    """As if draws of more than 5 of 30 samples were common; only the one that is protected is not zero.

    Its sum is 0 without it; with it 1, or (k + 1) / 5 if it is kept among k others, of whom 5 or more came.
    """
    rate, width, sigma = 0.1, 5, 0.5
    others = binom(29, rate)
    fills = others.sf(width - 1)
    k = np.arange(30)
    fits = k < width
    places = np.concatenate([[0.0, 1.0], (k[~fits] + 1) / width])
    kept = others.pmf(k[~fits]) * rate * width / (k[~fits] + 1)
    chances = np.concatenate([[0.0, rate * others.pmf(k[fits]).sum()], kept])
    chances[0] = 1 - chances.sum()
    at = np.linspace(-8, 14, 200_001)
    step = at[1] - at[0]
    without = norm.pdf(at, 0, sigma)
    ideal = (1 - rate) * without + rate * norm.pdf(at, 1, sigma)
    real = (chances[:, None] * norm.pdf(at, places[:, None], sigma)).sum(0)

    def divergence(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.maximum(one - np.exp(epsilon) * other, 0).sum() * step)

    assert divergence(real, without) > divergence(ideal, without)  # something is needed
    assert divergence(real, without) <= (1 - fills) * divergence(ideal, without) + fills
    assert divergence(without, real) <= (1 - fills) * divergence(without, ideal) + fills


@pytest.mark.parametrize(
    ("sigma", "rate", "minibatches", "of_all_data"),
    [(5.0, 0.2, 400, 0), (20.0, 1.0, 0, 50), (8.0, 0.1, 300, 7)],
)
def test_epsilon_is_a_little_below_that_of_renyi_divergences(sigma, rate, minibatches, of_all_data) -> None:
    """Another arithmetic for the same mechanisms, whose bounds are known to be looser."""
    renyi, gaussian = RdpAccountant(), dp_accounting.GaussianDpEvent(sigma)
    if minibatches:
        renyi.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), minibatches)
    if of_all_data:
        renyi.compose(gaussian, of_all_data)
    ours = epsilon_of(sigma, 1e-5, rate, minibatches, of_all_data)
    assert 0.9 * renyi.get_epsilon(1e-5) < ours < renyi.get_epsilon(1e-5)
    by_renyi = epsilon_of(sigma, 1e-5, rate, minibatches, of_all_data, "rdp")
    assert by_renyi == pytest.approx(renyi.get_epsilon(1e-5), rel=1e-4)


@pytest.mark.parametrize(("sigma", "times"), [(0.5, 1), (0.05, 1), (0.2, 15), (0.5, 10_000), (0.01, 2)])
def test_large_losses_are_told_from_above_without_as_many_points(sigma: float, times: int) -> None:
    """Of Gaussian mechanisms on all data the exact curve is known (Balle and Wang 2018)."""

    def delta(epsilon: float) -> float:
        noise = sigma / times**0.5
        one, other = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
        return float(norm.cdf(one) - np.exp(epsilon + norm.logcdf(other)))

    spent = epsilon_of(sigma, 1e-5, 1.0, 0, times)
    assert delta(spent) <= 1e-5 < delta(0.995 * spent)


def test_losses_beyond_all_numbers_are_infinite() -> None:
    assert epsilon_of(0.01, 1e-5, 1.0, 0, 10**6) == np.inf


def test_the_accountant_of_a_budget_decides_about_noise_and_end() -> None:
    given = {"model": "linear", "data": "digits", "nodes": 3, "topology": "ring", "rounds": 6}
    given |= {"batch_size": 16, "sampling": "poisson"}
    spent, noise = {}, {}
    for accountant in ("pld", "rdp"):
        budget = hf.DP(epsilon=2.0, delta=1e-4, clip=1.0, accountant=accountant)
        planned = np.array([[30, 0]])
        noise[accountant] = protection(budget, planned, np.array([400]), 16).multiplier
        private = hf.DP(epsilon=20.0, delta=1e-4, clip=1.0, noise_multiplier=1.0, accountant=accountant)
        result = hf.train(hf.LocalGECL(lr=0.1, local_steps=2), private=private, **given)
        spent[accountant] = result.history.rows[-1]["epsilon"]
    assert noise["pld"] < noise["rdp"] < 1.2 * noise["pld"]
    assert spent["pld"] < spent["rdp"]
    with pytest.raises(HoldfastError, match="accountant"):
        hf.DP(epsilon=2.0, delta=1e-4, clip=1.0, accountant="moments")


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "theirs"),
    [
        (1.0, 64 / 60000, 9370, 0.49438),  # its MNIST example: 10 epochs of 937 steps
        (1.1, 256 / 60000, 14040, 2.38070),
        (0.6, 0.001, 3000, 1.82621),
        (2.0, 0.1, 500, 5.55677),
    ],
)
def test_epsilon_is_that_of_opacus(sigma, rate, steps, theirs) -> None:
    """PRVAccountant of Opacus 1.6.0 with eps_error = 0.001; by default it adds an error of 0.01."""
    assert epsilon_of(sigma, 1e-5, rate, steps, 0) == pytest.approx(theirs, rel=0.01)


def test_the_noise_of_a_plan_uses_the_budget_and_no_more() -> None:
    planned = np.array([[200, 0], [200, 3]])
    ledger = protection(BUDGET, planned, np.array([500, 900]), 16)
    assert 0.98 * BUDGET.epsilon < ledger.epsilon_of(planned) <= BUDGET.epsilon
    more = protection(hf.DP(epsilon=1.0, delta=1e-5, clip=1.0), planned, np.array([500, 900]), 16)
    assert more.multiplier > ledger.multiplier


def test_the_node_with_the_largest_loss_counts() -> None:
    ledger = Ledger(BUDGET, np.array([1000, 100, 100]), 10, 2.0)
    ledger.record([5, 0], [0, 1])
    ledger.record([5, 0], [0, 2])
    assert ledger.accesses.tolist() == [[10, 0], [5, 0], [5, 0]]
    each = [epsilon_of(2.0, 1e-5, 0.01, 10, 0), epsilon_of(2.0, 1e-5, 0.1, 5, 0)]
    assert ledger.epsilon == max(each)


def test_draws_that_do_not_fit_their_rows_are_paid_for() -> None:
    assert epsilon_of(1.0, 1e-9, 0.01, 2000, 0) == np.inf  # 2000 draws of 1e-12 each are more than delta
    assert epsilon_of(1.0, 1e-9, 0.01, 0, 1) < np.inf


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_accesses_are_planned_as_they_happen(case) -> None:
    planned = planned_accesses(method(case), network(case), "all", 3, seed=4)
    rounds = [planned_accesses(method(case), network(case), "all", k, seed=4) for k in (0, 3)]
    assert planned.shape == (network(case).nodes, 2)
    assert (rounds[1] >= rounds[0]).all()
    assert planned.sum() > 0


def train(algorithm, **options):
    given = {"model": "linear", "data": "digits", "nodes": 4, "rounds": 4, "batch_size": 8}
    return hf.train(algorithm, **{**given, "sampling": "poisson", "private": BUDGET, **options})


@pytest.mark.slow
def test_epsilon_is_recorded_and_ends_within_the_budget() -> None:
    result = train(hf.LocalGECL(lr=0.3, local_steps=2), topology="ring", evaluate_every=2)
    spent = [row["epsilon"] for row in result.history.rows]
    assert spent == sorted(spent)
    assert spent[0] == 0.0
    assert 0.98 * BUDGET.epsilon < spent[-1] <= BUDGET.epsilon
    assert result.status == "done"


def test_training_ends_before_a_round_that_would_exceed_the_budget() -> None:
    loud = hf.DP(epsilon=3.0, delta=1e-5, clip=1.0, noise_multiplier=0.8)
    result = train(hf.FedAvg(lr=0.3, local_steps=2), rounds=500, private=loud, evaluate_every=50)
    last = result.history.rows[-1]
    assert result.status == "stopped"
    assert 0 < last["round"] < 500
    assert last["epsilon"] <= 3.0
    ledger = Ledger(loud, np.array([350] * 4), 8, 0.8)  # digits: 1437 samples, 359 or 360 at a node
    assert ledger.epsilon_of(np.array([[2 * (last["round"] + 3), 0]] * 4)) > 2.9


@pytest.mark.parametrize(
    ("method", "epsilon", "noise"),
    [(hf.FedAvg(lr=0.3, local_steps=2), 0.1, 0.6), (hf.Scaffnew(lr=0.3, p=0.2), 2.0, 0.9)],
)
def test_no_round_exceeds_the_budget_not_even_the_first_or_a_longer_one(method, epsilon, noise) -> None:
    """Scaffnew takes as many local steps as its coins say, which the plan knows."""
    loud = hf.DP(epsilon=epsilon, delta=1e-5, clip=1.0, noise_multiplier=noise)
    result = train(method, rounds=60, private=loud, evaluate_every=60)
    last = result.history.rows[-1]
    assert result.status == "stopped"
    assert (last["round"] > 0) == (epsilon > 1)
    assert last["epsilon"] <= epsilon


def test_rounds_of_whole_nodes_do_not_exceed_the_budget_either() -> None:
    loud = hf.NodeDP(epsilon=0.1, delta=1e-3, clip=0.5, noise_multiplier=0.6)
    result = hf.train(hf.FedAvg(lr=0.1), model="linear", data="digits", nodes=4, rounds=5, private=loud)
    assert [row["epsilon"] for row in result.history.rows] == [0.0]


def test_only_clients_that_were_asked_pay() -> None:
    planned = planned_accesses(hf.FedAvg(lr=0.1, local_steps=3), as_network("server", 6), 2, 5, seed=1)
    assert planned.sum() == 5 * 2 * 3
    assert (planned[:, 1] == 0).all()


class Two(World):
    """The first of two processes, as far as a plan looks at it."""

    size = 2


@pytest.mark.parametrize(
    ("algorithm", "network"),
    [
        ({"name": "dspodfl", "lr": 0.1}, {"topology": "ring", "compute": 0.3}),
        ({"name": "fedavg", "lr": 0.1, "local_steps": 2}, {"topology": "server", "cohort": 2}),
    ],
)
def test_accesses_that_another_process_would_not_count_are_refused(algorithm, network) -> None:
    """A rank counts what its own nodes do, and those of another may compute while its own are idle."""
    private = {"epsilon": 3.0, "delta": 1e-5, "clip": 1.0, "noise_multiplier": 1.0}
    problem = {"dataset": "digits", "nodes": 4, "model": "linear", "batch_size": 8, "sampling": "poisson"}
    raw = {"name": "test", "rounds": 2, "problem": problem | {"private": private}, "network": network}
    for world in (World(), Two()):
        plan = Plan.of_tables(raw | {"algorithm": [algorithm]}, None, "cpu", world)
        [job] = plan.jobs
        given = (job.id, plan.method(job), job.cohort)
        if world.size == 1:
            plan.setting(job).check(*given)
        else:
            with pytest.raises(HoldfastError, match="would not count accesses of nodes elsewhere"):
                plan.setting(job).check(*given)


def test_a_resumed_run_is_the_same_run(tmp_path) -> None:
    class Halt(hf.Callback):
        def on_round(self, job, round):
            if round == 2:
                raise KeyboardInterrupt

    quiet = hf.DP(epsilon=3.0, delta=1e-5, clip=1.0, noise_multiplier=4.0)
    options = {"topology": "ring", "rounds": 5, "checkpoint_every": 1, "evaluate_every": 5, "private": quiet}
    whole = train(hf.LocalGECL(lr=0.3, local_steps=2), **options, run_dir=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(hf.LocalGECL(lr=0.3, local_steps=2), **options, run_dir=tmp_path / "cut", callbacks=[Halt()])
    again = train(hf.LocalGECL(lr=0.3, local_steps=2), **options, run_dir=tmp_path / "cut", resume=True)
    assert (again.models == whole.models).all()
    assert again.history.rows[-1]["epsilon"] == whole.history.rows[-1]["epsilon"]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"clip": -1.0}, "clip"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
    ],
)
def test_a_budget_that_is_none_is_refused(budget, message) -> None:
    with pytest.raises(HoldfastError, match=f"DP.{message}"):
        hf.DP(**{"epsilon": 1.0, "delta": 1e-5, "clip": 1.0, **budget})


def test_accesses_are_those_that_the_methods_definition_says() -> None:
    """FedLin takes one gradient of all data and three of minibatches in every round."""
    planned = planned_accesses(hf.FedLin(lr=0.1, local_steps=3), as_network("server", 4), "all", 5, seed=1)
    assert planned.tolist() == [[15, 5]] * 4
