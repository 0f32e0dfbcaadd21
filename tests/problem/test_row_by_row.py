"""Recurrent models and those that cannot be stacked are trained and evaluated, and agree with torch."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from copy import deepcopy

import numpy as np
import pytest
import torch
from devices import every_device
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
from holdfast.data.samples import Pair
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.problem.flat import FlatModel
from holdfast.problem.gradients.recurrent import stackable_recurrence
from holdfast.problem.losses import CrossEntropy
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.row_loss import without_fused_layers

NODES = 3
KINDS = [nn.LSTM, nn.GRU, nn.RNN]


class Recurrent(nn.Module):
    """Reads a sequence [B, T, 3] and scores two classes."""

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.read = kind(3, 4, batch_first=True, **options)
        self.score = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.read(x)[0][:, -1])


class Doubled(torch.autograd.Function):
    """A user's own operation, without the form that could be stacked."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class WithOwnOperation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.score(x.flatten(1)))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


MODELS = {
    **{kind.__name__: lambda kind=kind: Recurrent(kind) for kind in KINDS},
    "own operation": WithOwnOperation,
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def sequences(samples: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 6, 3, generator=torch.Generator().manual_seed(0))
    return x, (x.sum((1, 2)) > 0).long()


def objective(
    model: nn.Module, device: str, dtype=torch.float64, batch_size=5, backend="auto"
) -> ModelProblem:
    x, y = sequences(24)
    data = hf.FederatedData(x.to(dtype), y, np.array([10, 8, 6]))
    flat = FlatModel(model, torch.device(device), dtype)
    return ModelProblem(flat, CrossEntropy(), data, batch_size=batch_size, seed=7, backend=backend)


def points(problem: ModelProblem) -> Tensor:
    away = torch.randn(NODES, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return problem.x0 + 0.1 * away.to(problem.x0)


def loss_of(problem: ModelProblem, row: Tensor, node: int) -> Tensor:
    """By torch alone."""
    start, count = int(problem.source.starts[node]), int(problem.source.counts[node])
    outputs = torch.func.functional_call(
        deepcopy(problem.model.template).to(row),
        problem.model.parameters(row),
        problem.source.stored.x[start : start + count],
    )
    return functional.cross_entropy(outputs, problem.source.stored.y[start : start + count])


@every_device
@every_model
def test_rows_agree_with_torch(model, device) -> None:
    problem = objective(seeded(model), device)
    x, nodes = points(problem), torch.arange(NODES, device=device)
    losses, gradients = [], []
    for node, row in enumerate(x):
        at = row.clone().requires_grad_()
        value = loss_of(problem, at, node)
        losses.append(value.detach())
        gradients += torch.autograd.grad(value, at)
    assert torch.allclose(problem.values(x, nodes), torch.stack(losses), rtol=1e-9)
    assert torch.allclose(problem.full_grads(x, nodes), torch.stack(gradients), rtol=1e-7, atol=1e-10)
    value, gradient = problem.global_value_and_grad(x[0])
    mean = torch.stack([loss_of(problem, x[0], node) for node in range(NODES)]).mean()
    assert torch.allclose(value, mean, rtol=1e-9)
    everywhere = problem.full_grads(x[:1].expand(NODES, -1).contiguous(), nodes).mean(0)
    assert torch.allclose(gradient, everywhere, rtol=1e-7, atol=1e-10)
    assert torch.allclose(problem.global_value(x[0]), value, rtol=1e-12)


@every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives(kind, dtype, device) -> None:
    problem = objective(seeded(lambda: Recurrent(kind)), device, dtype)
    x, nodes = points(problem), torch.arange(NODES, device=device)
    v = torch.ones_like(x)
    second = problem.hessians(x, nodes)
    tolerance = 1e-4 if dtype == torch.float64 else 3e-2
    step = 1e-5 if dtype == torch.float64 else 1e-2
    slope = (problem.full_grads(x + step * v, nodes) - problem.full_grads(x - step * v, nodes)) / (2 * step)
    products = problem.hessian_products(x, v, nodes)
    assert torch.allclose(products, (second @ v[..., None])[..., 0], rtol=1e-4, atol=1e-5)
    assert (products - slope).norm() <= tolerance * slope.norm()


@every_device
@every_model
def test_training_with_a_test_set(model, device) -> None:
    x, y = sequences()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = hf.train(
            hf.FedAvg(lr=0.2, local_steps=4),
            model=seeded(model),
            data=hf.partition(x[:40], y[:40], hf.IID(), nodes=NODES, seed=0),
            rounds=15,
            batch_size=8,
            test=(x[40:], y[40:]),
            device=device,
        )
    losses = result.history["train_loss"]
    assert losses[-1] < 0.9 * losses[0]
    with torch.no_grad():
        outputs = result.model(x[40:])
    right = (outputs.argmax(-1) == y[40:]).double().mean()
    assert result.history["test_accuracy"][-1] == pytest.approx(float(right))


@every_device
def test_every_node_is_tested_with_its_own_model(device) -> None:
    problem = objective(seeded(lambda: Recurrent(nn.LSTM).double()), device)
    x, y = sequences(12)
    rows = points(problem)
    accuracy, loss = problem.tester.test(rows, Pair(x.double().to(device), y.to(device)))
    for node, row in enumerate(rows):
        with torch.no_grad():
            outputs = problem.model.module(row)(x.double())
        assert float(loss[node]) == pytest.approx(float(functional.cross_entropy(outputs, y)), rel=1e-9)
        assert float(accuracy[node]) == pytest.approx(float((outputs.argmax(-1) == y).double().mean()))


@every_device
def test_the_executor_of_the_device_runs_the_same_rounds(device) -> None:
    network, algorithm = hf.Network.of(hf.ring(NODES)), hf.LocalGECL(lr=0.1, local_steps=3)
    plain = Simulation(algorithm, objective(seeded(lambda: Recurrent(nn.GRU)), device), network, seed=7)
    given = objective(seeded(lambda: Recurrent(nn.GRU)), device)
    executor = executor_for(torch.device(device))
    fast = Simulation(algorithm, given, network, seed=7, executor=executor)
    fast.prepare(10**6)
    for _ in range(5):
        plain.step()
        fast.step()
    assert torch.allclose(fast.models, plain.models, rtol=1e-9, atol=1e-12)
    assert given.stacked == (device == "cuda")


@every_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 2, "bidirectional": True},
        {"bias": False, "num_layers": 2, "dropout": 0.5},
        {"proj_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [*KINDS, "relu"])
def test_stacked_recurrence_is_that_of_torch(kind, options, device) -> None:
    """In eval mode, against torch's kernels on the user's own module; states that are handed over, too."""
    if "proj_size" in options and kind is not nn.LSTM:
        pytest.skip("only an LSTM has projections")
    more = {"nonlinearity": "relu"} if kind == "relu" else {}
    layer = seeded(lambda: (nn.RNN if kind == "relu" else kind)(3, 4, **options, **more)).double().to(device)
    layer.eval()
    flat = FlatModel(layer, torch.device(device), torch.float64)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64, generator=draw).to(device)  # [nodes, T, B, 3]

    def run(module: nn.Module, given: tuple[Tensor, ...]) -> list[Tensor]:
        first, state = module(given[0])
        second, final = module(given[0].flip(0), state)
        alone, _ = module(given[0][:, 0])
        return [first, second, alone, *(final if isinstance(final, tuple) else [final])]

    rows = flat.x0.expand(2, -1)
    stacked = torch.func.vmap(lambda row, given: flat.evaluate(row, run, (given,)))(rows, x)
    for node in range(2):
        for got, expected in zip(stacked, run(layer, (x[node],)), strict=True):
            assert torch.allclose(got[node], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS, "relu"])
def test_stacked_recurrence_has_the_derivatives_of_torch(kind) -> None:
    """Of a state that is handed over, too; second ones by autograd without torch's kernels.

    Second ones are taken backwards twice, and as Hessians are, forwards over backwards.
    """
    more = {"nonlinearity": "relu"} if kind == "relu" else {}
    layer = seeded(lambda: (nn.RNN if kind == "relu" else kind)(3, 4, bidirectional=True, **more)).double()
    weights = [weight.detach() for weight in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64, generator=draw)  # [nodes, T, B, 3]

    def value(module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        first, state = torch.func.functional_call(module, given, (x,))
        second, final = torch.func.functional_call(module, given, (first[..., :3], state))
        states = final if isinstance(final, tuple) else (final,)
        return (first**3).sum() + (second**2).sum() + sum((part**3).sum() for part in states)

    def gradient(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        every = tuple(range(len(weights) + 1))
        return torch.func.grad(lambda *given: value(stackable, *given), argnums=every)(x, *weights)

    def slope(x: Tensor) -> Tensor:
        return sum((part**2).sum() for part in gradient(x, *weights))

    stackable = stackable_recurrence(deepcopy(layer))
    nones = (None,) * len(weights)
    found = torch.func.vmap(gradient, in_dims=(0, *nones))(x, *weights)
    second = torch.func.vmap(torch.func.grad(slope))(x)
    forwards = torch.func.vmap(torch.func.jacfwd(slope))(x)
    for node in range(2):
        given = [tensor.clone().requires_grad_() for tensor in (x[node], *weights)]
        with without_fused_layers():
            expected = torch.autograd.grad(value(layer, *given), given, create_graph=True)
            [of_x] = torch.autograd.grad(sum((part**2).sum() for part in expected), given[:1])
        for got, right in zip(found, expected, strict=True):
            assert torch.allclose(got[node], right, rtol=1e-9, atol=1e-12)
        for got in (second, forwards):
            assert torch.allclose(got[node], of_x, rtol=1e-9, atol=1e-12)


@every_device
@every_model
def test_both_backends_have_the_same_gradients(model, device) -> None:
    if model is WithOwnOperation:
        pytest.skip("it cannot be stacked")
    found = []
    for backend in ("stacked", "loop"):
        problem = objective(seeded(model), device, backend=backend)
        x, nodes = points(problem), torch.arange(NODES, device=device)
        [(_, drawn)] = problem.minibatch_values_and_grads([x], nodes, 0, 1)
        found.append((drawn, problem.full_grads(x, nodes)))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-11)


class Noisy(WithOwnOperation):
    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + torch.rand_like(outputs)


class Counting(WithOwnOperation):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@every_device
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Noisy, r"the model \(Noisy\) fails.*draws random numbers"),
        (Counting, r"the model \(Counting\) fails.*changes a buffer in place"),
    ],
)
def test_what_may_not_be_in_a_model_is_refused_here_too(model, message, device) -> None:
    x, y = sequences()
    data = hf.partition(x, y, hf.IID(), nodes=NODES, seed=0)
    with pytest.raises(hf.HoldfastError, match=message):
        hf.train(hf.FedAvg(lr=0.1), model=seeded(model), data=data, rounds=1, device=device)


COUNT_THREADS = """
import os
import holdfast as hf
import torch
from holdfast.models import netfleet_cnn

torch.set_num_threads(2)
x, y = torch.randint(0, 256, (4, 64, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (4, 64))
data = hf.FederatedData.of_nodes(list(zip(x, y)))
problem = hf.build_problem(netfleet_cnn((1, 28, 28), 10), data)
problem.get_ready()
before = len(os.listdir("/proc/self/task"))
problem.minibatch_values_and_grads([problem.x0.expand(4, -1)], torch.arange(4), 0, 1)
print(problem.backend.description, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted where Linux lists them")
def test_each_thread_of_the_loop_keeps_to_one_core() -> None:
    """Two threads are started for two cores; kernels with teams of their own would wait for one another."""
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    how, started = done.stdout.strip().rsplit(" ", 1)
    assert "one by one on 2 cores" in how
    assert int(started) == 2
