"""Gradients of the nodes' objectives against plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast as hf
from holdfast.core.randomness import batch_indices
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.problem.flat import FlatModel
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.losses.base import Regulariser
from holdfast.problem.model_problem import ModelProblem

COUNTS = [3, 40, 7, 12]
REGULARISERS = {
    "none": Regulariser(),
    **{name: Regulariser(**{name: 0.3}) for name in sorted(Regulariser.names())},
    "all": Regulariser(**dict.fromkeys(Regulariser.names(), 0.2)),
}


def make_data() -> hf.FederatedData:
    """Four nodes of unequal sizes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(COUNTS), 5))
    return hf.FederatedData(torch.tensor(x), torch.tensor(rng.integers(0, 3, sum(COUNTS))), np.array(COUNTS))


def make_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def make_problem(batch_size: int | None = 4, **options) -> ModelProblem:
    model = FlatModel(make_net(), torch.device("cpu"), torch.float64)
    return ModelProblem(model, CrossEntropy(), make_data(), batch_size=batch_size, seed=5, **options)


def plain_grad(row: Tensor, x: Tensor, y: Tensor, regulariser: Regulariser) -> Tensor:
    """The gradient of the mean loss on (x, y) plus regulariser, by autograd on the module itself."""
    net = make_net()
    nn.utils.vector_to_parameters(row, net.parameters())
    value = nn.functional.cross_entropy(net(x), y)
    for p in net.parameters():
        value = value + regulariser.value(p.flatten())  # see test_regulariser.py
    return nn.utils.parameters_to_vector(torch.autograd.grad(value, list(net.parameters())))


def rows(problem: ModelProblem, nodes: int = 4) -> Tensor:
    """Another point for every node."""
    generator = torch.Generator().manual_seed(1)
    return problem.x0 + torch.randn(nodes, problem.dim, dtype=torch.float64, generator=generator)


def oracle(problem: ModelProblem, nodes: list[int], round: int = 2) -> BatchOracle:
    return BatchOracle(problem, torch.tensor(nodes), seed=5, round=round, work=Work())


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the order of summation in float64."""
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("regulariser", REGULARISERS.values(), ids=REGULARISERS)
def test_full_gradients_are_those_of_autograd(regulariser: Regulariser) -> None:
    problem, data = make_problem(regulariser=regulariser), make_data()
    x = rows(problem)
    found = oracle(problem, [0, 1, 2, 3]).full_grad(x)
    for node in range(4):
        assert close(found[node], plain_grad(x[node], *data.node(node), regulariser))


@pytest.mark.parametrize("regulariser", REGULARISERS.values(), ids=REGULARISERS)
def test_minibatch_gradients_are_those_of_autograd_on_the_drawn_samples(regulariser: Regulariser) -> None:
    problem, data = make_problem(regulariser=regulariser), make_data()
    x, everybody = rows(problem), torch.arange(4)
    asked = oracle(problem, [0, 1, 2, 3])
    for step in range(2):
        found = asked.grad(x)
        picks = batch_indices(5, everybody, torch.tensor(COUNTS), 2, step, 4)
        for node in range(4):
            own_x, own_y = data.node(node)
            mine = plain_grad(x[node], own_x[picks[node]], own_y[picks[node]], regulariser)
            assert close(found[node], mine)


def test_a_node_does_not_notice_who_else_is_asked() -> None:
    problem = make_problem()
    x = rows(problem)
    together = oracle(problem, [0, 1, 2, 3]).grad(x)
    for chosen in ([0], [3, 1], [2, 0, 1]):
        assert close(oracle(problem, chosen).grad(x[chosen]), together[chosen])
        full = oracle(problem, chosen).full_grad(x[chosen])
        assert close(full, oracle(problem, [0, 1, 2, 3]).full_grad(x)[chosen])


def test_gradients_at_two_points_are_of_the_same_samples() -> None:
    problem = make_problem()
    x, y = rows(problem), problem.x0
    at_x, at_y = oracle(problem, [0, 1, 2, 3]).grads(x, y)
    assert close(at_x, oracle(problem, [0, 1, 2, 3]).grad(x))
    assert close(at_y, oracle(problem, [0, 1, 2, 3]).grad(y))


def test_every_call_and_every_round_draws_anew() -> None:
    problem = make_problem()
    x = rows(problem)
    asked = oracle(problem, [0, 1, 2, 3])
    first, second = asked.grad(x), asked.grad(x)
    assert not close(first, second)
    assert not close(first, oracle(problem, [0, 1, 2, 3], round=3).grad(x))
    assert torch.equal(first, oracle(problem, [0, 1, 2, 3]).grad(x))


def test_work_is_counted() -> None:
    problem = make_problem()
    asked = oracle(problem, [1, 2])
    x = problem.x0
    asked.grad(x)
    asked.grads(x, x)
    asked.full_grad(x)
    assert asked.work.gradient_evaluations == 2 + 4 + 2
    assert asked.work.sample_gradients == 2 * 4 + 2 * 2 * 4 + (40 + 7)


def test_a_full_batch_takes_all_of_a_nodes_data() -> None:
    problem = make_problem(batch_size=None)
    x = rows(problem)
    assert close(oracle(problem, [0, 1, 2, 3]).grad(x), oracle(problem, [0, 1, 2, 3]).full_grad(x))


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_common_objective(weights) -> None:
    regulariser = REGULARISERS["all"]
    problem, data = make_problem(weights=weights, regulariser=regulariser), make_data()
    x = rows(problem, 1)[0]
    value, gradient = problem.global_value_and_grad(x)
    if weights == "samples":  # every sample counts alike: the pooled mean
        expected = plain_grad(x, data.x, data.y, regulariser)
    else:
        expected = torch.stack([plain_grad(x, *data.node(node), regulariser) for node in range(4)]).mean(0)
    assert close(gradient, expected)
    assert close(problem.global_value(x), value)
    # and the nodes' own gradients average to it, whatever the method
    own = oracle(problem, [0, 1, 2, 3]).full_grad(x)
    assert close(own.mean(0), expected)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_processes_that_hold_some_nodes_add_up_to_the_whole(weights) -> None:
    whole = make_problem(weights=weights, regulariser=REGULARISERS["all"])
    x, at = rows(whole), rows(whole, 1)[0]
    value, gradient = whole.global_value_and_grad(at)
    parts = []
    for held in ([1], [0, 2, 3]):
        model = FlatModel(make_net(), torch.device("cpu"), torch.float64)
        part = ModelProblem(
            model,
            CrossEntropy(),
            make_data().hold(held),
            batch_size=4,
            seed=5,
            weights=weights,
            regulariser=REGULARISERS["all"],
        )
        assert len(part.source.stored.x) == sum(COUNTS[node] for node in held)
        assert close(oracle(part, held).grad(x[held]), oracle(whole, held).grad(x[held]))
        assert close(oracle(part, held).full_grad(x[held]), oracle(whole, held).full_grad(x[held]))
        parts.append((part.global_value(at), *part.global_value_and_grad(at)))
    assert close(parts[0][0] + parts[1][0], value)
    assert close(parts[0][1] + parts[1][1], value)
    assert close(parts[0][2] + parts[1][2], gradient)
