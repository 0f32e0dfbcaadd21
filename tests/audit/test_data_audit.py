"""The attacks of ``holdfast audit``: they succeed where nothing protects, and fail where something does."""

from __future__ import annotations

import json
import math
import tomllib

import numpy as np
import pytest
import torch
from scipy.stats import norm

from holdfast.audit import Audit, Subject
from holdfast.audit.canaries import Bound, insert_canaries, refuted_epsilon, without_noise
from holdfast.audit.inversion import Inversion, invert, linear_layers, odd_one, optimised
from holdfast.audit.leakage import View, promised_epsilon
from holdfast.audit.membership import Figure, Membership, chosen, halves, infer, judged, likelihood_ratios
from holdfast.audit.subject import overheard
from holdfast.cli.app import app
from holdfast.cli.leakage import lines
from holdfast.core.errors import HoldfastError
from holdfast.data.samples import Pair
from holdfast.experiments.experiment_file import apply_override, with_defaults
from holdfast.experiments.plan import Plan
from holdfast.problem.source import Batch

FILE = """
rounds = 2
[problem]
dataset = "digits"
nodes = 4
batch_size = 1
[network]
topology = "server"
[[algorithm]]
name = "fedavg"
lr = 0.1
"""
PRIVATE = (
    "problem.batch_size=full",
    "problem.private={epsilon=1.0,delta=1e-5,clip=1.0,noise_multiplier=15.0}",
)


def subject(*changes: str) -> Subject:
    raw = tomllib.loads(FILE)
    for change in changes:
        apply_override(raw, change)
    plan = Plan.of_tables(with_defaults(raw), None, "cpu")
    return Subject.of(plan, plan.jobs[0])


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("problem.model={name='mlp',hidden=[8]}",),
        ("network.topology=ring", "algorithm.name=gossip"),
        ("network.topology=ring", "algorithm.name=gt-sgd"),
        ("algorithm.name=scaffold",),
    ],
    ids=str,
)
def test_one_message_of_one_sample_gives_it_away(changes):
    found = invert(subject("dtype=float64", *changes))
    assert max(found.errors) < 1e-5
    assert found.labels == 4
    assert found.guess > 0.1  # so it is not that all samples are alike


def test_noise_hides_it():
    noise = (
        "problem.sampling=poisson",
        "problem.private={epsilon=1.0,delta=1e-5,clip=1.0,noise_multiplier=1.0}",
    )
    private = subject(*noise)
    assert min(invert(private).errors) > 0.3
    assert min(invert(without_noise(private)).errors) < 1e-3  # clipping alone does not


def test_noise_of_a_server_hides_nothing_from_it():
    node = "problem.private={unit='node',epsilon=1.0,delta=1e-3,clip=1.0,noise_multiplier=5.0,noise='NOISE'}"
    private = subject(node.replace("NOISE", "server"))
    assert private.protections == [
        "differential privacy of nodes, noise by the server, epsilon 1 at delta 0.001"
    ]
    assert max(invert(private).errors) < 1e-3
    assert invert(private, of_mean=True).errors[0] > 0.3
    assert promised_epsilon(private) is None
    assert min(invert(subject(node.replace("NOISE", "clients"))).errors) > 0.3
    with pytest.raises(HoldfastError, match="a server sees no single message"):
        subject(node.replace("NOISE", "distributed"))


def test_optimisation_finds_the_sample_behind_a_gradient():
    problem = subject("problem.model={name='mlp',hidden=[32]}").problem
    x, y = problem.source.some(1).samples
    _, last = linear_layers(problem)
    vector = problem.row_loss.evaluated_gradient(problem.x0, Batch(Pair(x, y), torch.ones(1)))[1]
    [(found, label)] = optimised(problem, problem.x0, -0.01 * vector, last, 1, x[0])
    assert label == int(y[0])
    assert (found - x[0].flatten()).norm() < 0.2 * x.norm()


def test_the_class_is_the_odd_one_out():
    gradient = torch.softmax(torch.randn(5, generator=torch.Generator().manual_seed(0)), 0)
    gradient[3] -= 1
    assert odd_one(gradient) == odd_one(-0.1 * gradient) == 3
    assert odd_one(torch.tensor([1.0, -1.0, 1.0, -1.0])) is None


def test_what_is_overheard_tells_the_local_models():
    """Also where changes are sent: both as they were before they were averaged."""
    server, graph = subject(), subject("network.topology=complete", "algorithm.name=gossip")
    models = []
    for each in (server, graph):
        simulation = each.simulation()
        overheard(simulation)
        models.append(overheard(simulation).models)
    assert torch.allclose(*models, atol=1e-6)
    assert (models[0][0] - models[0][1]).norm() > 1e-3


def test_likelihood_ratios_are_those_of_two_normals():
    """With many runs the ratio is the optimal test: its AUC is that of two normals a distance apart."""
    rng, away = np.random.default_rng(0), 1.5
    members = rng.random((40, 150)) < 0.5
    difficulty = 3 * rng.standard_normal(150)  # a common threshold would be of no use
    figures = judged(difficulty + away * members + rng.standard_normal((40, 150)), members)
    assert figures.auc.value == pytest.approx(norm.cdf(away / math.sqrt(2)), abs=0.015)
    assert figures.auc.low < figures.auc.value < figures.auc.high
    expected = norm.sf(norm.isf(0.01) - away)
    assert figures.tpr[0.01].value == pytest.approx(expected, abs=0.04)
    nothing = judged(difficulty + rng.standard_normal((40, 150)), members)
    assert nothing.auc.value == pytest.approx(0.5, abs=0.02)


def test_a_sample_without_runs_of_both_kinds_says_nothing():
    ratios = likelihood_ratios(np.random.default_rng(0).standard_normal((4, 3)), np.ones((4, 3), bool))
    assert (ratios == 0).all()


def test_shadows_train_on_half_of_every_node():
    data = subject().data
    member = halves(data, np.random.default_rng(0))
    half = chosen(data, member)
    assert half.counts.tolist() == [(count + 1) // 2 for count in data.counts]
    assert torch.equal(half.node(2)[0], data.node(2)[0][torch.as_tensor(member[data.owners == 2])])


OVERFITTING = (
    "problem.nodes=20",
    "problem.batch_size=full",
    "problem.model={name='mlp',hidden=[32]}",
    "rounds=8",
    "algorithm.lr=0.5",
    "algorithm.local_steps=10",
)


@pytest.mark.slow
def test_members_are_found_where_nodes_overfit():
    found = infer(subject(*OVERFITTING), shadows=8)
    assert found["messages"].auc.low > 0.55
    assert found["messages"].auc.value > found["model"].auc.value


@pytest.mark.parametrize("right", [50, 70, 100])
def test_refuted_epsilons_are_those_of_a_binomial_test(right):
    """Without delta, epsilon is refuted if as many right guesses are unlikely with chances e^eps to 1."""
    from scipy.stats import binomtest

    found = refuted_epsilon(100, 100, right, 0.0)
    low = binomtest(right, 100).proportion_ci(0.9, method="exact").low  # one-sided 95 %, Clopper and Pearson
    assert found == pytest.approx(max(0.0, math.log(low / (1 - low))), abs=1e-3)
    assert refuted_epsilon(100, 100, right, 1e-3) <= found


CANARIES = (
    *PRIVATE,
    "rounds=5",
    "algorithm.local_steps=2",
    "problem.model={name='linear',zero=true}",
)


def test_canaries_stay_below_epsilon_and_are_seen_without_noise():
    """The promise is kept; and a run that clips but adds no noise would be found out."""
    private = subject(*CANARIES)
    kept, broken = insert_canaries(private), insert_canaries(without_noise(private))
    promised = promised_epsilon(private)
    assert promised is not None
    assert promised < 1.5
    assert kept.epsilon < promised
    assert broken.epsilon > 2.5
    assert broken.right > 0.95 * broken.guesses


@pytest.mark.slow
def test_canaries_over_many_seeds_and_budgets():
    for epsilon in (0.5, 2.0, 8.0):
        budget = f"problem.private={{epsilon={epsilon},delta=1e-5,clip=1.0}}"
        private = subject(*CANARIES, budget, "rounds=20")
        bounds = [insert_canaries(private, seed).epsilon for seed in range(10)]
        assert sum(bound > epsilon for bound in bounds) <= 2  # each exceeds it with a chance of 5 % at most
    assert max(bounds) > 0.1  # with little noise some canaries are seen


def test_what_cannot_be_audited_is_refused():
    for changes, words in (
        (("algorithm.name=ecl", "network.topology=ring"), "something else"),
        (("problem.dataset=quadratics", "problem.loss=squared-error"), "pairs|classes"),
    ):
        with pytest.raises(HoldfastError, match=words):
            subject(*changes)
    with pytest.raises(HoldfastError, match="canaries measure the epsilon"):
        insert_canaries(subject())


def test_the_command(tmp_path, capsys):
    file = tmp_path / "audit.toml"
    file.write_text(FILE)
    app(["audit", str(file), "--shadows", "4", "channel=half", "--json"], standalone_mode=False)
    [found] = json.loads(capsys.readouterr().out)
    for views in (found["views"], found["unprotected"]):
        assert [view["observer"] for view in views] == ["the server", "another client", "a stranger"]
        assert max(views[0]["inversion"]["errors"]) < 1e-2  # half precision protects nobody
        assert 0 <= views[2]["membership"]["tpr"]["0.01"]["low"] <= 1
    assert found["protections"] == ["channel Half"]


def test_what_was_found_is_said_in_sentences():
    figure = Figure(0.6, 0.5, 0.7)
    member = Membership(figure, {0.01: figure, 0.001: figure})
    view = View("the server", "every message", Inversion([0.01, 0.5], 1, 0.4, "analytic"), member)
    bounds = Bound(0.2, 60, 102, 128), Bound(3.5, 102, 102, 128)
    words = "\n".join(lines(Audit("fedavg", ["noise"], [view], [view], *bounds, 1.0)))
    assert words.count("a sample recovered in 1 of 2, its class in 1; relative error 0.01 to 0.5") == 2
    assert "AUC 0.600 [0.500, 0.700]; finds 60.0 % [50.0, 70.0] of members at 1 % false alarms" in words
    assert "epsilon is at least 0.20 (95 %); the ledger says 1.00 at most" in words
    assert "without noise: 102 of 102 right, epsilon at least 3.50" in words
