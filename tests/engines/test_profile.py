"""What a trial on the zero problem finds of a method, and how often methods are run there."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from test_conformance import CASES, NODES, RING, STAR, Case, case_id, method, network
from torch import Tensor

import holdfast as hf
from holdfast.api import as_network
from holdfast.contract import Method, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.profile import MANY, profile
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.common.trial import ZeroProblem

AT_MOST = 4  # rounds on the zero problem for a job
every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
CHANGING = hf.base_graph(NODES)
TOSSING = [hf.Scaffnew(lr=0.1, p=0.3), hf.FedPD(eta=0.5, lr=0.1, skip=0.5)]


# --- what is found ------------------------------------------------------------------------------------------


@every_case
def test_costs_are_those_of_a_round_of_all_nodes(case: Case):
    assert profile(method(case), network(case)).footprint() == dry_run(method(case), network(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.server], ids=case_id)
def test_costs_of_a_cohort(case: Case):
    if not isinstance(method(case), ServerAlgorithm) or case.name == "tamuna":
        pytest.skip("not led by a server, or needs more clients")
    assert profile(method(case), STAR).footprint(3) == dry_run(method(case), STAR, 3)


@pytest.mark.parametrize("name", ["gossip", "local-gecl", "k-gt", "flexgt", "fedrep"])
def test_costs_over_a_period(name: str):
    case = next(case for case in CASES if case.name == name)
    found, counted = profile(method(case), CHANGING).footprint(), dry_run(method(case), CHANGING)
    assert astuple(found) == pytest.approx(astuple(counted), rel=1e-12)


@pytest.mark.parametrize("channel", [hf.TopK(0.5), hf.Half(), hf.Natural(bits=4)], ids=repr)
@pytest.mark.parametrize("name", ["gossip", "local-gecl", "flexgt", "fedavg", "fedlin", "fedrep"])
def test_costs_with_what_a_channel_remembers(name: str, channel: hf.Channel):
    case = next(case for case in CASES if case.name == name)
    found = profile(method(case), network(case)).footprint(channel=channel)
    assert found == dry_run(method(case), network(case), channel=channel)


def test_what_is_sent_grows_with_the_model():
    found = profile(hf.FedRep(lr=0.1, head=3), RING)
    (message,) = found.sent_in_round(torch.zeros(20, dtype=torch.float32))
    assert (message.shape, message.dtype) == ((1, 17), torch.float32)
    (message,) = profile(hf.SCAFFOLD(lr=0.1), STAR).sent_in_round(torch.zeros(6))
    assert [part.shape for part in message] == [(1, 6), (1, 6)]


def test_uses_are_what_a_method_asks_for():
    assert profile(hf.Gossip(lr=0.1), RING).uses == set()
    assert profile(hf.LocalGECL(lr=0.1, alpha=0.1, warm_start_rounds=1), RING).uses == {
        "neighbour sums",
        "warm start",
    }
    assert profile(hf.PDMM(gamma=1.0), RING).uses == {"links"}
    assert profile(SumsLate(lr=0.1), RING).uses == {"neighbour sums"}, "in one round of many"


@dataclass(frozen=True)
class SumsLate(hf.Algorithm):
    """Asks for the plain sum in a single round."""

    lr: float

    def init(self, x0: Tensor, oracle: hf.Oracle, peers: hf.Peers) -> Tensor:
        return x0

    def round(self, s: Tensor, oracle: hf.Oracle, peers: hf.Peers) -> Tensor:
        received = peers.exchange(s - self.lr * oracle.grad(s))
        return received.neighbour_sum / peers.degree if oracle.round == 7 else received.mixed

    def model(self, s: Tensor) -> Tensor:
        return s


@pytest.mark.parametrize("tossing", TOSSING, ids=repr)
def test_where_coins_decide_the_round_that_sends_most_counts(tossing: Method):
    found = profile(tossing, STAR)
    assert found.rounds_differ
    assert len(found.sent_in_round(torch.zeros(4))) == 1


def test_where_the_round_decides_the_one_that_sends_most_counts():
    late = hf.FedPD(eta=0.5, lr=0.1, communicate_every=9)
    found = profile(late, STAR)
    assert len(found.sent_in_round(torch.zeros(4))) == 1
    like = torch.zeros(4)
    coins = lambda: lambda probability: True  # noqa: E731
    assert [len(found.sent_in(round, coins, like)[1]) for round in (7, 8)] == [0, 1]


def test_work_of_rounds_that_differ_is_counted_with_the_nodes_of_the_run():
    unequal = Simulation(hf.Gossip(lr=0.1, local_steps=[1, 2, 3, 4, 5]), ZeroProblem(NODES, 4), RING)
    assert unequal.work_per_round.gradient_evaluations == 15
    long = Simulation(hf.Scaffnew(lr=0.1, p=0.01), ZeroProblem(NODES, 4), STAR).work_per_round
    assert long.gradient_evaluations > 2 * NODES, "coins fall as in the run, not this way and that"


# --- how often ----------------------------------------------------------------------------------------------


class Counter:
    """Counts rounds of methods on the zero problem."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds = 0
        self._patch = monkeypatch

    def watch(self, kind: type[Method]) -> None:
        name = "client" if issubclass(kind, ServerAlgorithm) else "round"
        inner = getattr(kind, name)

        def counted(method: Any, state: Any, *others: Any) -> Any:
            oracle = next(o for o in others if hasattr(o, "problem"))
            self.rounds += isinstance(oracle.problem, ZeroProblem)
            return inner(method, state, *others)

        self._patch.setattr(kind, name, counted)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def quadratic(x: Tensor) -> Tensor:
    return (x - 1).square().sum() / 2


@every_case
def test_a_job_needs_few_rounds_on_the_zero_problem(case: Case, counter: Counter):
    counter.watch(type(method(case)))
    hf.minimize([quadratic] * NODES, torch.zeros(12), method(case), 1, topology=network(case))
    assert 0 < counter.rounds <= AT_MOST


def test_rounds_that_differ_are_all_looked_at_where_a_channel_remembers_them(counter: Counter):
    counter.watch(hf.LocalGECL)
    falling, channel = hf.LocalGECL(lr=hf.cosine(0.1, rounds=9)), hf.TopK(0.5)
    hf.minimize([quadratic] * NODES, torch.zeros(12), falling, 1, topology=RING, channel=channel)
    assert counter.rounds == 3 + MANY


def data() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((20, 5), dtype=np.float32), rng.integers(0, 3, 20)) for _ in range(NODES)]


@pytest.mark.parametrize(
    ("chosen", "options"),
    [
        (hf.LocalGECL(lr=0.1), {"topology": "ring"}),
        (hf.LocalGECL(lr=0.1), {"topology": "ring", "channel": hf.TopK(0.5)}),
        (hf.LocalGECL(lr=hf.cosine(0.1, rounds=2), local_steps=[1, 2, 3, 1, 1]), {"topology": "ring"}),
        (hf.KGT(lr=0.1), {"topology": CHANGING}),
        (hf.SCAFFOLD(lr=0.1), {"cohort": 2, "channel": hf.TopK(0.5)}),
        (hf.FedAvg(lr=0.1), {"aggregation": hf.Median()}),
        (hf.Scaffnew(lr=0.1, p=0.3), {}),
        (hf.DSpodFL(lr=0.1), {"topology": RING.sporadic(compute=0.5, links=0.5)}),
    ],
    ids=repr,
)
def test_training_needs_few_rounds_on_the_zero_problem(chosen: Method, options: Any, counter: Counter):
    """Also where how often to measure is found from what a round costs, and where channels remember."""
    counter.watch(type(chosen))
    hf.train(algorithm=chosen, model="linear", data=data(), rounds=2, **options)
    assert 0 < counter.rounds <= AT_MOST


# --- the trial is also the check ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgets(hf.Gossip):
    """Gives a state of another form in float64 only."""

    def round(self, s: Any, oracle: Any, peers: Any) -> Any:
        after = super().round(s, oracle, peers)
        return after if after.x.dtype == torch.float32 else after.x


def test_the_trial_refuses_what_does_not_keep_the_contract():
    with pytest.raises(HoldfastError, match=r"Forgets\.round: the state is a float64 tensor \[m, d\]"):
        profile(Forgets(lr=0.1), RING)


def test_a_profile_holds_one_record_of_each_trial():
    found = profile(hf.LocalGECL(lr=0.1), as_network("ring", NODES))
    assert [field.name for field in fields(found)] == ["method", "network", "tails", "one", "two"]
    assert found.two.dim == found.one.dim + 1
    assert not found.rounds_differ
