"""Gradients under differential privacy: clipped sample by sample, summed, noised."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from devices import every_device
from torch import nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.core.precision import compute_in, switches_restored
from holdfast.engines.common.counters import Work
from holdfast.engines.common.oracle import BatchOracle
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.convolution import PixelConv2d
from holdfast.problem.gradients.support import PlaneConv2d
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.private import Release, counted_noise, fits, normals
from holdfast.problem.row_loss import RowLoss

NODES, SIZE = 3, 4
F64 = torch.float64


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def problem(**options) -> ModelProblem:
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(8 + node, 5, generator=generator) * 2, torch.arange(8 + node) % 3)
        for node in range(NODES)
    ]
    given = {"batch_size": SIZE, "sampling": "poisson", **options}
    model = FlatModel(mlp(), torch.device("cpu"), F64)
    return ModelProblem(model, CrossEntropy(), hf.from_datasets(data), seed=5, **given)


def silent(clip: float) -> Release:
    return Release(clip, 0.0, counted_noise(0))


def sample_gradients(own: ModelProblem, row: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[B, d]: by autograd, one sample after the other."""
    gradients = []
    for i in range(len(x)):
        at = row.clone().requires_grad_()
        outputs = functional_call(own.model.template, own.model.parameters(at), (x[i : i + 1],))
        gradients.append(torch.autograd.grad(nn.functional.cross_entropy(outputs, y[i : i + 1]), at)[0])
    return torch.stack(gradients)


@pytest.mark.parametrize("at_once", [10**6, 5, 1])
def test_clipped_sums_are_those_of_single_samples(at_once) -> None:
    own = problem()
    protected = own.protected(silent(clip=2.5))
    protected._protected.at_once = at_once
    nodes = torch.arange(NODES)
    rows = own.x0 + 0.3 * torch.randn(NODES, own.dim, dtype=F64, generator=torch.Generator().manual_seed(2))
    [(_, got)] = protected.minibatch_values_and_grads([rows], nodes, 3, 1)
    batch = own.source.batch(nodes, 3, 1)
    for i in range(NODES):
        each = sample_gradients(own, rows[i], batch.samples.x[i], batch.samples.y[i])
        norms = each.norm(dim=1)
        assert (norms > 2.5).any()
        assert (norms < 2.5).any()
        clipped = each * (2.5 / norms).clamp(max=1)[:, None]
        torch.testing.assert_close(got[i], batch.weight[i] @ clipped, rtol=1e-12, atol=1e-14)


def convolutional(kind: type[nn.Conv2d]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, stride=2 if kind is nn.Conv2d else 1),
        nn.Tanh(),
        nn.Sequential(nn.Conv2d(3, 4, (2, 3), dilation=2, bias=False), nn.ReLU(), nn.MaxPool2d(2))
        if kind is nn.Conv2d
        else nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model(torch.zeros(1, 1, 16, 16))
    for layer in model.modules():
        if type(layer) is nn.Conv2d and (kind is PixelConv2d or layer.in_channels == 1):
            layer.__class__ = kind
    return model


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 2, bias=False), nn.Flatten(), nn.Linear(32, 3)
    )


@pytest.mark.parametrize("kind", [nn.Conv2d, PlaneConv2d, PixelConv2d, nn.Linear])
def test_layer_by_layer_gives_what_single_samples_give(kind, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (1, 16, 16) if issubclass(kind, nn.Conv2d) else (16, 16)
    data = [(torch.randn(9 + i, *shape, generator=generator), torch.arange(9 + i) % 3) for i in range(NODES)]
    module = convolutional(kind) if issubclass(kind, nn.Conv2d) else tokens()
    model = FlatModel(module, torch.device("cpu"), F64)
    own = ModelProblem(
        model, CrossEntropy(), hf.from_datasets(data), seed=5, batch_size=4, sampling="poisson"
    )
    nodes = torch.arange(NODES)
    rows = own.x0 + 0.3 * torch.randn(NODES, own.dim, dtype=F64, generator=generator)
    assert fits(own.row_loss)
    asked = ([rows], nodes, 3, 1)
    [got] = own.protected(silent(clip=1.0)).minibatch_values_and_grads(*asked)
    monkeypatch.setattr("holdfast.problem.private.fits", lambda _: False)
    [expected] = own.protected(silent(clip=1.0)).minibatch_values_and_grads(*asked)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(5, 3), nn.Softmax(dim=0)),  # mixes samples
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)),
        nn.Sequential(*[nn.Linear(5, 5)] * 2),  # runs twice
    ],
)
def test_other_models_are_not_taken_layer_by_layer(model) -> None:
    flat = FlatModel(model, torch.device("cpu"), F64)
    assert not fits(RowLoss(flat, CrossEntropy()))


def centred(_: nn.Module, *arguments: Any) -> Any:
    """As a hook: takes the mean over all samples away."""
    x = arguments[-1]
    return (x[0] - x[0].mean(0, keepdim=True),) if isinstance(x, tuple) else x - x.mean(0, keepdim=True)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "forward"])
def test_what_a_hook_does_to_other_samples_is_not_missed(register) -> None:
    """Layer by layer, samples would be computed together, and a hook may let one change all others."""
    module = mlp()
    if register == "forward":
        module[1].forward = lambda x: centred(module[1], x.tanh())
    else:
        getattr(module[1], register)(centred)
    model = FlatModel(module, torch.device("cpu"), F64)
    assert not fits(RowLoss(model, CrossEntropy()))


def test_without_clipping_and_noise_they_are_the_gradients() -> None:
    own = problem()
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)
    protected = own.protected(silent(clip=1e9))
    for read in ("minibatch_values_and_grads", "full_grads"):
        arguments = ([rows], nodes, 0, 0) if read.startswith("mini") else (rows, nodes)
        one, other = getattr(own, read)(*arguments), getattr(protected, read)(*arguments)
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


@every_device
@pytest.mark.parametrize("layerwise", [True, False])
def test_no_clipped_gradient_is_made_longer_by_tf32(device, layerwise, monkeypatch) -> None:
    """Factors rounded to ten bits: the sum could be a thousandth longer than the noise is made for."""
    if not layerwise:
        monkeypatch.setattr("holdfast.problem.private.fits", lambda _: False)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))
    model = FlatModel(module, torch.device(device), torch.float32)
    data = hf.from_datasets([(torch.randn(1, 50), torch.zeros(1, dtype=torch.int64)) for _ in range(64)])
    own = ModelProblem(model, CrossEntropy(), data, seed=5).protected(silent(clip=0.01))
    [batch] = own.source.all_of(torch.arange(64, device=device), 10**6)
    given = own.x0.expand(64, -1), batch, torch.zeros(64, 4, dtype=torch.int64, device=device)
    with switches_restored():
        compute_in("tf32")
        _, sums = own._protected.values_and_gradients(*given)
        # A compiled round runs this graph, in which switches are as they are then.
        traced = make_fx(lambda *given: own._protected.values_and_gradients(*given))(*given)
    assert sums.double().norm(dim=1).max() < 0.01 * (1 + 1e-6)
    full = torch.ops.holdfast.full_product.default
    assert sum(node.target is full for node in traced.graph.nodes) == (
        2 if layerwise else 1
    )  # a layer, or all


def test_no_sample_moves_the_sum_by_more_than_the_sensitivity() -> None:
    own = problem(batch_size=None, sampling="replacement").protected(silent(clip=0.5))
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)
    [batch] = own.source.all_of(nodes, 10**6)
    _, whole = own._protected.values_and_gradients(rows, batch, torch.zeros(NODES, 4, dtype=torch.int64))
    bound = own.source.sample_weight(nodes) * 0.5
    moved = []
    for sample in range(8):
        without = batch._replace(weight=batch.weight.clone())
        without.weight[:, sample] = 0
        _, part = own._protected.values_and_gradients(rows, without, torch.zeros(NODES, 4, dtype=torch.int64))
        moved.append((whole - part).norm(dim=1) / bound)
    largest = torch.stack(moved).max()
    assert 1 - 1e-9 < largest < 1 + 1e-9  # the bound is reached, and not exceeded


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_does_not_show(value, layerwise, monkeypatch) -> None:
    own = problem(batch_size=None, sampling="replacement")
    if not layerwise:
        monkeypatch.setattr("holdfast.problem.private.fits", lambda _: False)
    protected = own.protected(silent(clip=0.5))
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)
    expected = protected.full_grads(rows, nodes)
    [batch] = own.source.all_of(nodes, 10**6)
    keys = torch.zeros(NODES, 4, dtype=torch.int64)
    poisoned = batch._replace(samples=batch.samples._replace(x=batch.samples.x.clone()))
    poisoned.samples.x[0, 0] = value
    _, got = protected._protected.values_and_gradients(rows, poisoned, keys)
    assert got.isfinite().all()
    torch.testing.assert_close(got[1:], expected[1:])


def test_noise_has_the_size_that_is_accounted_for() -> None:
    own, multiplier, clip = problem(), 1.5, 0.8
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)
    noisy = own.protected(Release(clip, multiplier, counted_noise(9)))
    quiet = own.protected(silent(clip))

    def noise(points: int, round: int) -> torch.Tensor:
        asked = ([rows] * points, nodes, round, 0)
        pairs = zip(
            noisy.minibatch_values_and_grads(*asked), quiet.minibatch_values_and_grads(*asked), strict=True
        )
        return torch.stack([a[1] - b[1] for a, b in pairs])

    expected = clip * multiplier / SIZE
    single = torch.stack([noise(1, round) for round in range(40)]) / expected
    assert abs(single.std() - 1) < 0.03
    assert abs(single.mean()) < 0.03
    double = torch.stack([noise(2, round) for round in range(40)]) / expected
    assert abs(double.std() - math.sqrt(2)) < 0.03
    both = double.flatten(2).transpose(0, 1).flatten(1)
    assert abs(torch.corrcoef(both)[0, 1]) < 0.03  # the two points of an access have noise of their own


def test_noise_of_all_data_is_that_of_their_weights() -> None:
    """A sample weighs 1/N in a gradient of all data, 1/B in a minibatch."""
    own, nodes = problem(), torch.arange(NODES)
    rows = own.x0.expand(NODES, -1)
    noisy = own.protected(Release(0.8, 1.5, counted_noise(9)))
    exact = own.protected(silent(0.8)).full_grads(rows, nodes)
    noise = torch.stack([noisy.full_grads(rows, nodes, round) - exact for round in range(40)])
    sizes = 0.8 * 1.5 / torch.tensor([8.0, 9.0, 10.0])
    torch.testing.assert_close(noise.std(dim=(0, 2)).float(), sizes, rtol=0.05, atol=0)


def test_points_of_an_access_differ_in_noise_whoever_computes_gradients() -> None:
    """Otherwise the difference of two gradients would be free of noise; compiled rounds compute them so."""
    own = problem().protected(Release(0.8, 1.5, counted_noise(9)))
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)

    def alone(x, nodes, round, step):
        return own.minibatch_values_and_grads([x], nodes, round, step)[0]

    expected = BatchOracle(own, nodes, 5, 2, Work()).grads(rows, rows)
    got = BatchOracle(own, nodes, 5, 2, Work(), gradient=alone).grads(rows, rows)
    assert not torch.isclose(*got).any()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_whole_batches_and_gradients_of_all_data_have_noise_of_their_own() -> None:
    """Where batches are all data, a method that asks for both gets two releases in a step."""
    own = problem(batch_size=None, sampling="replacement")
    nodes, rows = torch.arange(NODES), own.x0.expand(NODES, -1)
    exact = own.protected(silent(0.8)).full_grads(rows, nodes)
    oracle = BatchOracle(own.protected(Release(0.8, 1.5, counted_noise(9))), nodes, 5, 2, Work())
    noise = torch.cat(
        [g - exact for g in (oracle.grad(rows), oracle.full_grad(rows), *oracle.grads(rows, rows))]
    )
    assert len(noise) == 4 * NODES
    for i, j in itertools.combinations(range(len(noise)), 2):
        assert not torch.isclose(noise[i], noise[j]).any()


def test_noise_is_a_function_of_node_round_and_step() -> None:
    noise, nodes = counted_noise(3), torch.arange(4)
    all_of_them = noise(nodes, 5, 6, 0, 11)
    torch.testing.assert_close(noise(nodes[2:3], 5, 6, 0, 11), all_of_them[2:3], rtol=0, atol=0)
    others = [noise(nodes, 5, 7, 0, 11), noise(nodes, 6, 6, 0, 11), noise(nodes, 5, 6, 1, 11)]
    others.append(counted_noise(4)(nodes, 5, 6, 0, 11))
    for other in others:
        assert not torch.isclose(other, all_of_them).any()


def test_normal_numbers_are_normal() -> None:
    words = torch.randint(2**32, (50_000, 4), generator=torch.Generator().manual_seed(0))
    numbers = normals(words)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(float((numbers.double() ** power).mean()) - moment) < 0.05
    extremes = normals(torch.tensor([[0, 0, 0, 0], [2**32 - 1] * 4]))
    assert extremes.isfinite().all()
    assert extremes.abs().max() > 6


def test_dropout_differs_between_the_samples_of_a_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 6, generator=generator).expand(8, -1)  # the same sample eight times
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.5), nn.Linear(12, 2))
    own = ModelProblem(
        FlatModel(model, torch.device("cpu"), F64),
        CrossEntropy(),
        hf.from_datasets([(x, torch.zeros(8, dtype=torch.int64))]),
        seed=5,
    ).protected(silent(1e9))
    [batch] = own.source.all_of(torch.tensor([0]), 10**6)
    keys = torch.tensor([[5, 0, 0, 0]])
    row, gradients = own.x0[None], []
    for sample in range(8):
        alone = batch._replace(weight=torch.zeros_like(batch.weight))
        alone.weight[:, sample] = 1
        gradients.append(own._protected.values_and_gradients(row, alone, keys)[1][0])
    assert len({tuple(g.tolist()) for g in gradients}) == 8


class BatchMean(nn.Module):
    def forward(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampling": "replacement"}, r'sampling = "poisson", or batch_size = "full"'),
        ({"sampling": "epochs"}, r"accounted for as Poisson samples"),
        (
            {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))},
            r"BatchNorm mixes",
        ),
        ({"loss": BatchMean()}, r"one number for a batch"),
        ({"augment": lambda samples, key: samples}, r"may mix them"),
    ],
)
def test_what_cannot_be_private_is_refused(changed, message) -> None:
    options = {"model": "linear", "data": "digits", "sampling": "poisson", "nodes": 4, **changed}
    budget = hf.DP(epsilon=3, delta=1e-5, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(HoldfastError, match=message):
        hf.train(hf.FedAvg(lr=0.1), rounds=1, private=budget, **options)


@pytest.mark.parametrize(
    ("solver", "what"),
    [
        (hf.Newton(), "Hessians"),
        (hf.LBFGS(tolerance=None, max_steps=2), "values"),
        (hf.LBFGS(tolerance=1e-3), "as many gradients as a stopping rule demands"),
        (hf.GradientDescent(lr=0.1, stop="gradient", tolerance=1e-3), "as many gradients as a stopping rule"),
    ],
)
def test_a_solver_that_asks_for_more_than_planned_gradients_is_refused(solver, what) -> None:
    with pytest.raises(HoldfastError, match=rf"private: the method's solver asks for {what}"):
        hf.train(
            hf.FedDyn(alpha=0.1, solver=solver),
            model="linear",
            data="digits",
            nodes=4,
            l2=0.1,
            batch_size="full",
            rounds=1,
            private=hf.DP(epsilon=30, delta=1e-5, clip=1.0, noise_multiplier=1.0),
        )


def test_own_steps_that_end_at_a_tolerance_are_refused_like_such_a_solver() -> None:
    method = hf.FedPD(eta=1.0, solver="gd", lr=0.1, local_steps=5, tolerance=1e-3)
    budget = hf.DP(epsilon=30, delta=1e-5, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(HoldfastError, match=r"private: the method's solver asks for as many gradients"):
        hf.train(method, model="linear", data="digits", nodes=4, batch_size="full", rounds=1, private=budget)


def test_on_a_cpu_there_are_no_more_rows_than_a_draw_needs() -> None:
    """The same samples, and the same sums up to rounding; where a node has noise of its own, rows stay."""
    own, release, nodes = problem(), silent(clip=2.5), torch.arange(NODES)
    protected = own.protected(release)
    rows = own.x0.expand(NODES, -1)
    widths = set()
    for step in range(20):
        all_rows, needed = own.source.batch(nodes, 0, step), protected.source.batch(nodes, 0, step)
        width = needed.weight.shape[1]
        widths.add(width)
        assert width == max(1, int((all_rows.weight > 0).sum(1).max()))
        assert torch.equal(all_rows.weight[:, :width], needed.weight)
        keys = torch.zeros(NODES, 4, dtype=torch.int64)
        some, every = (protected._gradients(rows, batch, keys)[1] for batch in (needed, all_rows))
        torch.testing.assert_close(some, every, rtol=1e-12, atol=1e-14)
    assert len(widths) > 1
    recorded = protected.source.batch(nodes, torch.tensor(0), torch.tensor(1))
    assert recorded.weight.shape == own.source.batch(nodes, 0, 1).weight.shape
    alone = protected.source.drawn_by(lambda *given: own.source.draws.shuffle(*given))
    assert alone.draws.trims is False
