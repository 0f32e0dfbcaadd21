"""How minibatches are drawn: in epochs, by Poisson sampling, and what augmentation does to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

import holdfast as hf
from holdfast.engines.simulate.choice import executor_for
from holdfast.experiments.experiment_file import read_experiment
from holdfast.experiments.setting import build_setting
from holdfast.experiments.spec import Experiment
from holdfast.problem.sampling import OVERFLOW, Epochs, Poisson, build_sampling, rows_for, weights_of

DRAW = torch.Generator().manual_seed(0)
COUNTS = torch.tensor([5, 8, 3])
NODES = torch.arange(3)


def nodes_of(counts: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(c, 4, generator=DRAW), torch.randint(3, (c,), generator=DRAW)) for c in counts]


def problem_of(nodes: list[Any], **options: Any) -> Any:
    torch.manual_seed(0)
    data = hf.FederatedData.of_nodes(nodes)
    return hf.build_problem(nn.Linear(4, 3), data, **{"dtype": torch.float64, "batch_size": 4, **options})


def gradients_of(problem: Any, x: Tensor, round: int, step: int) -> Tensor:
    [(_, gradients)] = problem.minibatch_values_and_grads([x], torch.arange(len(x)), round, step)
    return gradients


# --- epochs --------------------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once_and_the_next_another_order() -> None:
    draws, orders = Epochs(7, COUNTS, 4), {}
    for round in range(2):
        for node, count in enumerate(COUNTS.tolist()):
            steps = -(-count // 4)
            for epoch in range(3):
                seen = []
                for step in range(epoch * steps, (epoch + 1) * steps):
                    drawn = draws.draw(NODES, round, step)
                    assert drawn.inside is not None
                    inside = drawn.inside[node]
                    assert int(drawn.size[node]) == int(inside.sum())
                    seen += drawn.places[node][inside].tolist()
                assert sorted(seen) == list(range(count))
                orders[round, node, epoch] = tuple(seen)
    assert len({order for (_, node, _), order in orders.items() if node == 1}) == 6
    assert orders[0, 0, 0] != orders[1, 0, 0]


def test_epochs_are_a_function_of_node_round_and_step_alone() -> None:
    draws, other = Epochs(7, COUNTS, 4), Epochs(7, COUNTS, 4)
    draws.draw(NODES, 0, 0)
    some = torch.tensor([2, 1])
    for step in (3, 0, 2**31):
        alone, among = other.draw(some, 4, step), draws.draw(NODES, 4, step)
        assert torch.equal(alone.places, among.places[some])
    # As in a compiled round, where round and step are tensors.
    given = draws.draw(NODES, torch.tensor(4), torch.tensor(3))
    assert torch.equal(given.places, draws.draw(NODES, 4, 3).places)


def test_the_gradients_of_an_epoch_average_to_the_full_one() -> None:
    problem = problem_of(nodes_of([6, 10]), sampling="epochs", weights="samples")
    x, nodes = torch.randn(2, problem.dim, dtype=torch.float64, generator=DRAW), torch.arange(2)
    for node, sizes in ((0, [4, 2]), (1, [4, 4, 2])):
        total = sum(size * gradients_of(problem, x, 3, step)[node] for step, size in enumerate(sizes))
        expected = problem.full_grads(x, nodes)[node]
        assert torch.allclose(total / sum(sizes), expected, rtol=1e-12)


def test_local_steps_of_an_epoch() -> None:
    equal, unequal = (hf.FederatedData.of_nodes(nodes_of(counts)) for counts in ([10, 12], [10, 13]))
    assert equal.local_steps(epochs=3, batch_size=4) == 9
    with pytest.raises(hf.HoldfastError, match=r"an epoch is 3 steps for node 0 and 4 for node 1"):
        unequal.local_steps(epochs=1, batch_size=4)


# --- Poisson -------------------------------------------------------------------------------------------


def counted(count: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Whether each of ``count`` samples was taken in each of 4000 draws of 4, and its mean weight."""
    draws, nodes = Poisson(1, torch.full((400,), count), 4), torch.arange(400)
    draws.width = width or draws.width
    taken, weight = torch.zeros(10, 400, count), torch.zeros(10, 400, count, dtype=torch.float64)
    for round in range(10):
        drawn = draws.draw(nodes, round, 1)
        taken[round].scatter_add_(1, drawn.places, drawn.inside.float())
        weight[round].scatter_add_(1, drawn.places, weights_of(drawn, torch.ones(400).double()))
    return taken.view(-1, count), weight.view(-1, count).mean(0)


@pytest.mark.parametrize("count", [12, 40])
def test_poisson_takes_each_sample_by_itself_and_is_unbiased(count) -> None:
    taken, weight = counted(count)
    q = 4 / count
    spread = 4.5 * np.sqrt(q * (1 - q) / len(taken))
    assert int(taken.max()) == 1
    assert (taken.mean(0) - q).abs().max() < spread
    assert (weight - 1 / count).abs().max() < spread / 4
    # Independent: the number of samples varies as a binomial one.
    assert taken.sum(1).var().item() == pytest.approx(count * q * (1 - q), rel=0.12)


def test_smaller_nodes_are_padded_with_nothing() -> None:
    drawn = Poisson(1, torch.tensor([5, 40]), 4).draw(torch.arange(2), 0, 0)
    assert drawn.places[0].max() < 5
    assert drawn.inside[0].sum() <= 5


def test_a_draw_of_too_many_stays_unbiased() -> None:
    taken, weight = counted(30, width=5)  # as if draws of more than 5 were rare
    assert taken.sum(-1).max() == 5
    assert (weight - 1 / 30).abs().max() < 0.006
    assert weight.sum().item() == pytest.approx(1, abs=0.03)


def test_there_are_rows_for_all_but_the_rarest_draws() -> None:
    from scipy.stats import binom

    for mean in (1, 32, 500):
        reached = binom(10 * mean, 0.1).sf  # reached(k - 1): how likely a draw has k samples or more
        assert reached(rows_for(mean) - 1) < OVERFLOW
        width = rows_for(mean, 10 * mean)
        assert reached(width - 1) < OVERFLOW <= reached(width - 2)
    assert Poisson(0, torch.tensor([100, 142]), 32).width == 71  # of any number of samples, 80
    assert Poisson(0, torch.tensor([40]), 32).width == 40  # never more than there are samples


def test_gradients_of_poisson_batches_add_up() -> None:
    """The weights are 1/B, whatever the number of samples."""
    nodes = nodes_of([9, 12])
    problem = problem_of(nodes, sampling="poisson")
    x = torch.randn(2, problem.dim, dtype=torch.float64, generator=DRAW)
    drawn = problem.source.draws.draw(torch.arange(2), 2, 1)
    gradients = gradients_of(problem, x, 2, 1)
    for node, (inputs, labels) in enumerate(nodes):
        own = drawn.places[node][drawn.inside[node]]
        weights = x[node].clone().requires_grad_()
        scores = inputs[own].double() @ weights[:12].view(3, 4).T + weights[12:]
        functional.cross_entropy(scores, labels[own], reduction="sum").backward()
        assert torch.allclose(gradients[node], weights.grad / 4, rtol=1e-12)


def test_sampling_that_cannot_be() -> None:
    data = nodes_of([3, 9])
    with pytest.raises(hf.HoldfastError, match="node 0 has 3 samples, fewer than batch_size = 4"):
        problem_of(data, sampling="poisson")
    with pytest.raises(hf.HoldfastError, match="sampling = 'epochs' draws minibatches, but batch_size is"):
        problem_of(data, sampling="epochs", batch_size="full")
    mean = problem_of(data, sampling="epochs", loss=nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert not mean.loss.per_sample
    with pytest.raises(hf.HoldfastError, match="a loss that gives one number for a batch would count"):
        mean.check_model()
    with pytest.raises(hf.HoldfastError, match="sampling: should be 'replacement', 'epochs' or 'poisson'"):
        hf.train(hf.FedAvg(lr=0.1), model=nn.Linear(4, 3), data=data, rounds=1, sampling="epoch")
    assert build_sampling("replacement", 0, COUNTS, None) is None


def test_an_experiment_file_says_how_samples_are_drawn() -> None:
    raw = read_experiment(None, ["problem.sampling=epochs", "problem.batch_size=10"])
    raw["algorithm"] = raw["algorithm"][0]
    setting = build_setting(Experiment(**raw), 0, None, "cpu")
    assert isinstance(setting.problem.source.draws, Epochs)
    with pytest.raises(ValueError, match="sampling"):
        Experiment(**{**raw, "problem": {**raw["problem"], "sampling": "epoch"}})


# --- augmentation --------------------------------------------------------------------------------------


def noisy(samples: Any, key: Tensor) -> Any:
    noise = hf.random_normal(key, samples.x.shape)
    flipped = hf.random_uniform(key, (len(samples.x), 1), draw=1) < 0.5
    return samples._replace(x=torch.where(flipped, -samples.x, samples.x) + noise)


def test_numbers_drawn_from_a_key() -> None:
    keys = torch.tensor([[1, 0, 2, 3], [1, 1, 2, 3], [1, 0, 3, 3]])
    uniform = vmap(lambda key: hf.random_uniform(key, (100, 100)))(keys)
    assert torch.equal(uniform[1], hf.random_uniform(keys[1], (100, 100)))
    assert 0 <= uniform.min() < 1e-3 < 0.999 < uniform.max() < 1
    assert (uniform.mean((1, 2)) - 0.5).abs().max() < 0.01
    normal = hf.random_normal(keys[0], (20_000,))
    assert normal.mean().abs() < 0.03
    assert normal.var().item() == pytest.approx(1, abs=0.04)
    assert normal.pow(4).mean().item() == pytest.approx(3, abs=0.3)
    draws = [hf.random_uniform(keys[0], (50,), draw=draw) for draw in range(2)]
    assert not torch.equal(*draws)
    assert len({tuple(row[:3, 0].tolist()) for row in uniform}) == 3


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_minibatches_are_augmented_and_full_data_are_not(backend) -> None:
    nodes = nodes_of([6, 9])
    plain, augmented = (problem_of(nodes, backend=backend, augment=a, seed=4) for a in (None, noisy))
    augmented.check_model()
    x, both = torch.randn(2, plain.dim, dtype=torch.float64, generator=DRAW), torch.arange(2)
    assert torch.equal(plain.full_grads(x, both), augmented.full_grads(x, both))
    assert torch.equal(plain.global_value(x[0]), augmented.global_value(x[0]))
    gradients = gradients_of(augmented, x, 5, 2)
    for node in range(2):
        samples = plain.source.batch(torch.tensor([node]), 5, 2).samples
        own = type(samples)(samples.x[0], samples.y[0])
        changed = noisy(own, torch.tensor([4, node, 5, 2]))
        weights = x[node].clone().requires_grad_()
        scores = changed.x @ weights[:12].view(3, 4).T + weights[12:]
        functional.cross_entropy(scores, own.y).backward()
        assert torch.allclose(gradients[node], weights.grad, rtol=1e-10)


@pytest.mark.parametrize("sampling", ["replacement", "epochs", "poisson"])
@pytest.mark.parametrize("compiler", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drawn_and_augmented_alike_in_compiled_rounds(sampling, compiler, monkeypatch) -> None:
    monkeypatch.setattr("holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 0)
    if not compiler:
        monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)
    nodes, method = nodes_of([6, 9]), hf.FedAvg(lr=0.1, local_steps=3)
    plain, compiled = (
        hf.Simulation(
            method,
            problem_of(nodes, augment=noisy, sampling=sampling),
            hf.server(2),
            **({} if executor is None else {"executor": executor}),
        )
        for executor in (None, executor_for(torch.device("cpu")))
    )
    assert compiled.prepare(4).startswith("all nodes stacked, compiled; prepared in")
    for _ in range(4):
        plain.step()
        compiled.step()
    assert torch.allclose(plain.models, compiled.models, rtol=1e-9)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (lambda samples, key: samples._replace(x=samples.x + torch.rand(1)), "it draws random numbers"),
        (lambda samples, key: samples._replace(x=samples.x + np.random.rand()), "draw from the key alone"),
        (
            lambda samples, key: samples._replace(x=samples.x[:, :2]),
            r"augment gives x torch.float64 \[2, 2\]",
        ),
        (lambda samples, key: samples.z, "augment fails on a batch of x torch.float64"),
    ],
)
def test_augmentation_that_cannot_be(augment, message) -> None:
    with pytest.raises(hf.HoldfastError, match=message):
        problem_of(nodes_of([6, 9]), augment=augment).check_model()
