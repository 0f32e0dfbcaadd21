"""Attacks do what their papers say, to what leaves an attacker, and to nothing else."""

from __future__ import annotations

import statistics
import tomllib

import pytest
import torch
from conftest import make_quadratics
from torch import Tensor

import holdfast as hf
from holdfast.api import as_network
from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.experiment_file import with_defaults
from holdfast.experiments.plan import Plan

N, D = 10, 4
ATTACKERS = [1, 4, 5]
HONEST = [i for i in range(N) if i not in ATTACKERS]


def forge(attack: hf.Attack) -> tuple[Tensor, Tensor]:
    messages = torch.randn(N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    attackers = torch.isin(torch.arange(N), torch.tensor(attack.nodes))[:, None]
    told = attack.forge(messages, attackers, N)
    assert torch.equal(told[HONEST], messages[HONEST])
    return messages, told[ATTACKERS]


def test_signs_are_flipped():
    messages, lies = forge(hf.SignFlip(ATTACKERS, scale=2.0))
    assert torch.equal(lies, -2 * messages[ATTACKERS])


def test_the_inner_product_with_the_honest_mean_is_negative():
    messages, lies = forge(hf.InnerProduct(ATTACKERS, scale=0.5))
    mean = messages[HONEST].mean(0)
    assert torch.allclose(lies, (-0.5 * mean).expand(3, D), rtol=0, atol=1e-15)
    _, enough = forge(hf.InnerProduct(ATTACKERS, scale=3.0))  # more than honest over false: the mean turns
    assert (torch.cat([messages[HONEST], enough]).mean(0) * mean).sum() < 0


def test_little_is_enough_is_within_the_spread():
    """Baruch et al.: n = 50, m = 24 gives s = 2 and z = 1.43, the 24/26 quantile (they round to 1.5)."""
    messages, lies = forge(hf.LittleIsEnough(ATTACKERS, z=1.5))
    honest = messages[HONEST]
    expected = honest.mean(0) - 1.5 * honest.std(0, correction=0)
    assert torch.allclose(lies, expected.expand(3, D), rtol=0, atol=1e-14)
    assert hf.LittleIsEnough(list(range(24))).published(50) == pytest.approx(
        statistics.NormalDist().inv_cdf(24 / 26)
    )
    assert hf.LittleIsEnough([0]).published(10) == 0.0  # more than half of the honest would have to help


def test_flipped_labels_are_learned_from_by_attackers_only():
    x, y = torch.eye(4).repeat(3, 1), torch.arange(4).repeat(3)
    data = [(x, y)] * 4
    result = hf.train(
        hf.FedRep(lr=1.0, head=["weight"], head_steps=50, local_steps=1),
        model=torch.nn.Linear(4, 4),
        data=data,
        rounds=1,
        batch_size="full",
        attack=hf.LabelFlip([2]),
        progress=False,
    )
    learned = [result.node_model(i)(torch.eye(4)).argmax(1).tolist() for i in range(4)]
    assert learned == [[0, 1, 2, 3], [0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("topology", ["complete", "server"])
def test_an_attacker_lies_to_others_and_not_to_itself(topology):
    problem = make_quadratics(nodes=4)
    network = as_network(topology, 4, 0, None, hf.SignFlip([3]))
    simulation = Simulation(hf.Gossip(lr=0.1), problem, network)
    true = simulation.models - 0.1 * problem.grads(simulation.models)
    simulation.step()
    told = true.clone()
    told[3] *= -1
    expected = told.mean(0).expand(4, -1).clone()
    if topology == "complete":
        expected[3] = true.mean(0)
    assert torch.allclose(simulation.models, expected, rtol=0, atol=1e-14)


def test_figures_are_about_honest_nodes():
    functions = [lambda x, c=c: ((x - c) ** 2).sum() for c in (1.0, 1.0, 7.0)]
    result = hf.minimize(
        functions, [0.0], hf.Gossip(lr=0.1), 1, topology="ring", attack=hf.SignFlip([2]), progress=False
    )
    honest = result.x[-1][:2]
    assert result.history["consensus"][-1] == pytest.approx(float(honest.var(correction=0)), abs=1e-15)
    assert float(result.x[-1].var(correction=0)) > 0.1


def test_a_cohort_without_attackers_is_told_the_truth():
    problem = make_quadratics(nodes=6)
    network = as_network("server", 6, 0, None, hf.SignFlip([0], scale=100.0))
    attacked, calm = (
        Simulation(hf.FedAvg(lr=0.1), problem, each, cohort=2, seed=3)
        for each in (network, as_network(None, 6))
    )
    for _ in range(8):
        before = calm.models.clone()
        alone = 0 not in calm.rounds.cohort(calm.round).tolist()
        if not torch.equal(attacked.models, before):
            break
        attacked.step()
        calm.step()
        assert torch.allclose(attacked.models, calm.models, atol=1e-12) == alone


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (hf.SignFlip([6]), "node 6 is not among the 6 nodes"),
        (hf.SignFlip(list(range(6))), "nobody is left"),
    ],
)
def test_attackers_that_are_not_there(attack, words):
    problem = make_quadratics(nodes=6)
    with pytest.raises(HoldfastError, match=words):
        Simulation(hf.Gossip(lr=0.1), problem, as_network("ring", 6, 0, None, attack))


FILE = """
rounds = 2
[problem]
dataset = "digits"
nodes = 6
[network]
topology = "complete"
aggregation = ["median", { name = "trimmed-mean", attackers = 1 }]
attack = { name = "sign-flip", nodes = [0, 1] }
[[algorithm]]
name = "gossip"
lr = 0.1
[[algorithm]]
name = "local-gecl"
lr = 0.1
"""


def test_rules_and_attacks_in_a_file():
    """A list of rules is a sweep, a list of attackers is not; an exact method gets a warning."""
    plan = Plan.of_tables(with_defaults(tomllib.loads(FILE)), None, "cpu")
    assert len(plan.jobs) == 4
    networks = [plan.setting(job).network for job in plan.jobs]
    assert {type(network.aggregation) for network in networks} == {hf.Median, hf.TrimmedMean}
    assert all(network.attack == hf.SignFlip([0, 1]) for network in networks)
    warnings = plan.warnings()
    assert warnings
    assert all("local-gecl" in text and "keep sums" in text for text in warnings)
    plan.check()
