"""BatchNorm: batch statistics in training, statistics of training data in evaluation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from devices import every_device
from torch import nn
from torch.nn import functional

import holdfast as hf
from holdfast.data.samples import Pair

DRAW = torch.Generator().manual_seed(0)
COUNTS = [10, 7, 12]


def data() -> list[Any]:
    """Nodes whose inputs differ in mean and scale."""
    draw = torch.Generator().manual_seed(3)
    return [
        (
            (i + 1) * torch.randn(count, 4, dtype=torch.float64, generator=draw) + 3 * i,
            torch.arange(count) % 3,
        )
        for i, count in enumerate(COUNTS)
    ]


def normed() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.BatchNorm1d(4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def problem_of(model: nn.Module, **options: Any) -> Any:
    options = {"dtype": torch.float64, "batch_size": "full"} | options
    problem = hf.build_problem(model, hf.FederatedData.of_nodes(data()), **options)
    problem.check_model()
    return problem


def points(problem: Any) -> torch.Tensor:
    away = torch.randn(3, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (problem.x0.cpu() + 0.3 * away).to(problem.x0)


def statistics(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """By hand: mean and variance of the inputs of both layers, where the batch is all of ``x``."""
    module, found = deepcopy(module).train(), []
    for layer in module:
        if isinstance(layer, nn.BatchNorm1d):
            found += [x.mean(0), x.var(0, correction=0)]
        x = layer(x)
    return [tensor.detach() for tensor in found]


def buffers(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for name, buffer in module.named_buffers() if "running" in name]


@every_device
@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_local_statistics_are_those_of_a_nodes_own_data(backend, device) -> None:
    problem = problem_of(normed(), backend=backend, device=device)
    rows = problem.tester.complete(points(problem), problem.here)
    test = Pair(*(part.to(device) for part in data()[1]))
    accuracy, loss = problem.tester.test(rows, test)
    for node, (x, _) in enumerate(data()):
        module = problem.model.module(rows[node])
        for got, expected in zip(buffers(module), statistics(module, x), strict=True):
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-12)
        outputs, targets = module.eval()(data()[1][0]), data()[1][1]
        assert loss[node].item() == pytest.approx(functional.cross_entropy(outputs, targets).item(), rel=1e-9)
        assert accuracy[node].item() == pytest.approx((outputs.argmax(-1) == targets).double().mean().item())


def test_the_average_follows_the_law_of_total_variance() -> None:
    problem = problem_of(normed(), buffers="average")
    rows = problem.tester.complete(points(problem), problem.here)
    assert torch.equal(rows[0, problem.dim :], rows[2, problem.dim :])
    modules = [problem.model.module(row) for row in rows]
    own = [statistics(module, x) for module, (x, _) in zip(modules, data(), strict=True)]
    for layer, (mean, variance) in enumerate(zip(*[iter(buffers(modules[1]))] * 2, strict=True)):
        means = torch.stack([found[2 * layer] for found in own])
        variances = torch.stack([found[2 * layer + 1] for found in own])
        assert torch.allclose(mean, means.mean(0))
        assert torch.allclose(variance, variances.mean(0) + means.var(0, correction=0))


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_training_is_torchs_in_train_mode(backend) -> None:
    problem = problem_of(normed(), backend=backend)
    x = points(problem)
    gradients = problem.full_grads(x, problem.here)  # nodes of unequal size: padding must not count
    for node, (inputs, targets) in enumerate(data()):
        module = problem.model.module(x[node]).train()
        functional.cross_entropy(module(inputs), targets).backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters()])
        assert torch.allclose(gradients[node], expected, rtol=1e-9, atol=1e-12)


def test_minibatches_are_pooled_and_do_not_depend_on_who_else_is_asked() -> None:
    problem = problem_of(normed(), batch_size=4)
    x = points(problem)
    rows = problem.tester.complete(x, problem.here)
    one = problem.tester.complete(x[1:2], problem.here[1:2])
    assert torch.allclose(rows[1], one[0], rtol=1e-10)
    batches = [problem.source.batch(problem.here, 0, step).samples.x[1] for step in range(64)]
    first = torch.cat(batches)  # of the first layer, whose input does not depend on the batch
    module = problem.model.module(rows[1])
    assert torch.allclose(module[0].running_mean, first.mean(0), rtol=1e-9)
    assert torch.allclose(module[0].running_var, first.var(0, correction=0), rtol=1e-9)


@pytest.mark.parametrize("choice", ["local", "average"])
def test_training_from_python(choice, tmp_path) -> None:
    result = hf.train(
        hf.LocalGECL(lr=0.1, local_steps=3),
        model=normed(),
        data=data(),
        topology="ring",
        rounds=20,
        batch_size=4,
        buffers=choice,
        test=data()[0],
        dtype="float64",
    )
    assert result.history["train_loss"][-1] < 0.9 * result.history["train_loss"][0]
    assert not torch.equal(result.model[2].running_var, torch.ones(5).double())
    own = [result.node_model(node)[0].running_mean for node in range(3)]
    assert torch.equal(own[0], own[2]) == (choice == "average")
    result.save(tmp_path / "result.safetensors")
    again = hf.load_result(tmp_path / "result.safetensors", normed())
    assert torch.equal(again.node_model(2)[2].running_var, result.node_model(2)[2].running_var)
    outputs = result.model.eval()(data()[0][0])
    assert result.history["average_loss"][-1] == pytest.approx(
        functional.cross_entropy(outputs, data()[0][1]).item(), rel=1e-9
    )


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model = normed()
    model[0].running_mean += 1
    model[0].eval()
    problem = problem_of(model)
    assert problem.model.statistics == 5
    assert torch.equal(
        problem.model.module(problem.tester.complete(problem.x0[None])[0])[0].running_mean,
        torch.ones(4).double(),
    )


class OwnNorm(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(hf.HoldfastError, match=r"layer '0' \(OwnNorm\).*running statistics"):
        problem_of(nn.Sequential(OwnNorm(4), nn.Linear(4, 3)).double())
