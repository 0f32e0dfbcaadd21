"""The mathematics of the rules: what attackers cannot do, and what the rules do without any."""

from __future__ import annotations

import pytest
import torch
from conftest import make_quadratics
from torch import Tensor

import holdfast as hf
from holdfast.api import as_network
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation

K, D = 9, 5
RULES = [
    hf.Median(),
    hf.TrimmedMean(2),
    hf.Krum(2),
    hf.Krum(2, keep=3),
    hf.NearestNeighbours(2),
    hf.NearestNeighbours(2, rule=hf.Krum(2)),
    hf.ClippedGossip(2),
    hf.ClippedGossip(radius=0.5),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def combined(rule: hf.Aggregation, messages: Tensor, present: Tensor | None = None) -> Tensor:
    """Of ``messages`` [k, d], all with the same weight."""
    there = torch.ones(len(messages), dtype=torch.bool) if present is None else present
    weights = there.double() / there.sum()
    return rule.combine(messages[None], weights[None], there[None])[0]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_where_everybody_says_the_same_that_is_the_result(rule):
    row = numbers(D)
    assert torch.allclose(combined(rule, row.expand(K, D)), row, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_order_of_neighbours_does_not_count(rule):
    messages = numbers(K, D)
    order = [0, *(torch.randperm(K - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()]
    assert torch.allclose(combined(rule, messages), combined(rule, messages[order]), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_shifted_messages_have_a_shifted_result(rule):
    messages, shift = numbers(K, D), 10 * numbers(D, seed=1)
    assert torch.allclose(combined(rule, messages + shift), combined(rule, messages) + shift, atol=1e-12)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_places_that_nobody_takes_hold_anything(rule):
    messages = numbers(K, D)
    for nothing in (0.0, 1e9, torch.nan):
        longer = torch.cat([messages, torch.full((3, D), nothing, dtype=torch.float64)])
        present = torch.arange(K + 3) < K
        assert torch.allclose(combined(rule, longer, present), combined(rule, messages), rtol=0, atol=1e-14)


@pytest.mark.parametrize("lie", [-1e12, 1e12, 3.0, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", [hf.Median(), hf.TrimmedMean(2)], ids=repr)
def test_attackers_cannot_leave_the_range_of_honest_values(rule, lie):
    honest = numbers(K - 2, D)
    result = combined(rule, torch.cat([honest, torch.full((2, D), lie, dtype=torch.float64)]))
    assert (result >= honest.amin(0)).all()
    assert (result <= honest.amax(0)).all()


def test_one_attacker_more_can():
    honest, lie = numbers(K - 3, D), torch.full((3, D), 1e12, dtype=torch.float64)
    assert (combined(hf.TrimmedMean(2), torch.cat([honest, lie])) > 1e10).all()
    assert (combined(hf.Median(), torch.cat([honest, lie])) <= honest.amax(0)).all()  # of 9, 4 may be false


def test_the_trimmed_mean_of_a_known_case():
    values = torch.tensor([[1.0], [2.0], [3.0], [10.0], [100.0]], dtype=torch.float64)
    assert combined(hf.TrimmedMean(1), values).item() == 5.0
    assert combined(hf.Median(), values).item() == 3.0
    assert combined(hf.Median(), values[:4]).item() == 2.5


@pytest.mark.parametrize("lie", [1e3, 4.0, torch.nan])
def test_krum_picks_an_honest_message(lie):
    honest = numbers(K - 2, D)
    messages = torch.cat([honest, lie + 0.01 * numbers(2, D, seed=2)])
    assert (combined(hf.Krum(2), messages) == honest).all(1).any()
    mean = combined(hf.Krum(2, keep=3), messages)
    assert (mean >= honest.amin(0)).all()
    assert (mean <= honest.amax(0)).all()


def test_krum_scores_are_those_of_the_paper():
    messages, b = numbers(K, D), 2
    squares = (messages[:, None] - messages[None]).square().sum(-1)
    scores = [squares[i][[j for j in range(K) if j != i]].sort().values[: K - b - 2].sum() for i in range(K)]
    assert torch.equal(combined(hf.Krum(b), messages), messages[int(torch.stack(scores).argmin())])


def test_nearest_neighbours_halve_what_differs_before_the_rule():
    honest = numbers(K, D)
    near = [honest[(honest - row).square().sum(1).argsort()[: K - 2]].mean(0) for row in honest]
    expected = torch.stack(near).median(0).values
    assert torch.allclose(combined(hf.NearestNeighbours(2), honest), expected, rtol=0, atol=1e-14)


def test_clipped_gossip_bounds_what_a_neighbour_moves():
    own, honest = torch.zeros(1, D, dtype=torch.float64), 0.1 * numbers(K - 2, D)
    for lie in (1e9, torch.nan):
        false = torch.full((1, D), lie, dtype=torch.float64)
        moved = combined(hf.ClippedGossip(radius=0.5), torch.cat([own, honest, false]))
        assert (moved - honest.sum(0) / K).norm() <= 0.5 / K + 1e-12


def test_the_adaptive_radius_is_that_of_the_paper():
    messages, b = numbers(K, D), 2
    squares = (messages[1:] - messages[0]).square().sum(1)
    delta, near = b / K, squares.sort().values[: K - 1 - b]
    radius = float(((near / K).sum() / delta).sqrt())
    given = combined(hf.ClippedGossip(radius=radius), messages)
    assert torch.allclose(combined(hf.ClippedGossip(b), messages), given, rtol=0, atol=1e-14)


@pytest.mark.parametrize("topology", ["ring", "complete", "star"])
def test_clipped_gossip_without_clipping_is_plain_gossip(topology):
    problem = make_quadratics(nodes=6)
    plain, unclipped, wide = (
        run(problem, hf.Gossip(lr=0.05, local_steps=3), 20, topology, rule)
        for rule in (None, hf.ClippedGossip(), hf.ClippedGossip(radius=1e6))
    )
    assert torch.allclose(plain.models, unclipped.models, rtol=0, atol=1e-13)
    assert torch.allclose(plain.models, wide.models, rtol=0, atol=1e-13)


def run(problem, method, rounds: int, topology, rule=None, attack=None) -> Simulation:
    simulation = Simulation(method, problem, as_network(topology, problem.nodes, 0, rule, attack))
    for _ in range(rounds):
        simulation.step()
    return simulation


def test_without_differences_the_median_costs_nothing():
    """With the same data everywhere an exact method still reaches the optimum."""
    problem = make_quadratics(nodes=5)
    same = type(problem)(problem.A[:1].expand(5, -1, -1).clone(), problem.b[:1].expand(5, -1).clone())
    simulation = run(same, hf.LocalGECL(lr=0.1, local_steps=2), 200, "complete", hf.Median())
    assert torch.allclose(simulation.models, same.b[:1].expand(5, -1), rtol=0, atol=1e-8)


@pytest.mark.parametrize("rule", [hf.Median(), hf.TrimmedMean(1)], ids=repr)
def test_with_differences_an_exact_method_stalls_away_from_the_optimum(rule):
    """The sum of the duals is kept by the mean, and by nothing else: so the limit is biased."""
    problem, method = make_quadratics(nodes=5), hf.LocalGECL(lr=0.05, local_steps=2)
    optimum = torch.linalg.solve(problem.A.sum(0), torch.einsum("nij,nj->i", problem.A, problem.b))
    exact, robust = (run(problem, method, 400, "complete", each) for each in (None, rule))
    assert (exact.models - optimum).norm() < 1e-8 * optimum.norm()
    assert (robust.models - optimum).norm() > 0.05 * optimum.norm()
    before = robust.models.clone()
    for _ in range(50):
        robust.step()
    assert torch.allclose(robust.models, before, rtol=0, atol=1e-8)  # it has come to rest there
    sums = [run.rounds.duals(run.state).sum(0).norm() for run in (exact, robust)]
    assert sums[0] < 1e-12
    assert sums[1] > 0.1


def test_refusals_say_why():
    problem = make_quadratics(nodes=6)
    for method, topology, rule, words in (
        (
            hf.Gossip(lr=0.1),
            "ring",
            hf.TrimmedMean(2),
            "at least 5 messages, and node 0 has, its own included, 3",
        ),
        # A mean of all six holds what the attacker sent.
        (hf.FedAvg(lr=0.1), "server", hf.Krum(1, keep=6), "at least 7 messages, and the server receives 6"),
        (hf.FedAvg(lr=0.1), "server", hf.ClippedGossip(1), "a server has none"),
        (hf.ECL(lr=0.1), "ring", hf.Median(), "has one for every link"),
        (hf.DSpodFL(lr=0.1), hf.Network.of(hf.ring(6)).sporadic(0.5, 0.5), hf.Krum(0), "same in every round"),
    ):
        with pytest.raises(HoldfastError, match=words):
            run(problem, method, 0, topology, rule)
    network = as_network("ring", 6, 0, hf.Median())
    with pytest.raises(HoldfastError, match="neither another aggregation"):
        Simulation(hf.Gossip(lr=0.1), problem, network, channel=hf.TopK(0.5))
    with pytest.raises(HoldfastError, match=r"NearestNeighbours\.rule"):
        hf.NearestNeighbours(1, rule=hf.ClippedGossip(1))


def test_noise_for_a_mean_does_not_cover_a_rule():
    options = {"model": "linear", "data": "digits", "nodes": 6, "rounds": 1, "progress": False}
    private = hf.NodeDP(epsilon=1.0, delta=1e-3, clip=1.0, noise_multiplier=5.0)
    with pytest.raises(HoldfastError, match="its noise is for the mean"):
        hf.train(hf.FedAvg(lr=0.1), private=private, aggregation=hf.Median(), **options)


def test_compressed_messages_are_judged_as_they_arrive():
    problem = make_quadratics(nodes=6)
    network = as_network("complete", 6, 0, hf.Median())
    simulation = Simulation(hf.Gossip(lr=0.05), problem, network, channel=hf.Half())
    plain = Simulation(hf.Gossip(lr=0.05), problem, network)
    for _ in range(5):
        simulation.step()
        plain.step()
    assert torch.allclose(simulation.models, plain.models, atol=1e-2)
    assert not torch.equal(simulation.models, plain.models)
