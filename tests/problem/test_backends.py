"""Gradient backends agree with one another, are chosen by a rule that says why, and can be overruled."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from command_line import experiment_file
from devices import every_device
from test_row_by_row import MODELS, Recurrent, sequences
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.proxy import TraceError

import holdfast as hf
from holdfast.core.tree import tree_map
from holdfast.data.samples import Pair
from holdfast.experiments.plan import Plan
from holdfast.models import Dropout
from holdfast.problem.flat import FlatModel
from holdfast.problem.forward import forward
from holdfast.problem.gradients.backend import Activations
from holdfast.problem.gradients.choice import choose_backend
from holdfast.problem.gradients.stacked import TRACE_FROM_CALLS
from holdfast.problem.losses import CrossEntropy, SquaredError
from holdfast.problem.model_problem import ModelProblem
from holdfast.problem.row_loss import RowLoss
from holdfast.problem.source import ArraySource, Batch

BACKENDS = ["stacked", "loop"]
COUNTS = np.array([9, 6, 5])


def softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), Dropout(0.2), nn.Linear(6, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(32, 3))


every_model = pytest.mark.parametrize("model", [softmax, mlp, cnn])


def images() -> tuple[Tensor, Tensor]:
    x = torch.randn(
        int(COUNTS.sum()), 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return x, torch.arange(len(x)) % 3


def objective(model, backend="auto", device="cpu", **options) -> ModelProblem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        flat = FlatModel(model(), torch.device(device), torch.float64)
    options = {"batch_size": 4, "weights": "samples", **options}
    return ModelProblem(
        flat, CrossEntropy(), hf.FederatedData(*images(), COUNTS), seed=7, backend=backend, **options
    )


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@every_device
@every_model
def test_backends_agree(model, device) -> None:
    stacked, loop = (objective(model, backend, device) for backend in BACKENDS)
    nodes = torch.tensor([2, 0, 1], device=device)
    draw = torch.Generator().manual_seed(1)
    x, v = (torch.randn(3, stacked.dim, dtype=torch.float64, generator=draw).to(device) for _ in range(2))
    test = stacked.test_set(Pair(*images()))
    for ask in (
        lambda f: f.minibatch_values_and_grads([x, v], nodes, 3, 2)[1][1],
        lambda f: f.full_grads(x, nodes),
        lambda f: f.values(x, nodes),
        lambda f: f.hessian_products(x, v, nodes),
        lambda f: torch.stack(f.tester.test(x, test)),
        lambda f: f.global_value_and_grad(x[0])[1],
    ):
        assert close(ask(stacked), ask(loop))


@pytest.mark.parametrize("backend", BACKENDS)
def test_hessians_are_those_of_the_products(backend) -> None:
    problem = objective(softmax, backend)
    x = problem.x0.expand(3, -1).contiguous()
    v = torch.randn(3, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nodes = torch.arange(3)
    assert close((problem.hessians(x, nodes) @ v[..., None])[..., 0], problem.hessian_products(x, v, nodes))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_without_accuracy_is_tested(backend) -> None:
    flat = FlatModel(nn.Linear(3, 1), torch.device("cpu"), torch.float64)
    x, y = torch.randn(2, 20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = hf.FederatedData(x, y[:, 0], COUNTS)
    problem = ModelProblem(flat, SquaredError(), data, seed=0, batch_size=4, backend=backend)
    rows = problem.x0.expand(2, -1)
    accuracy, loss = problem.tester.test(rows, Pair(x, y[:, 0]))
    expected = (flat.evaluate(problem.x0, forward, Pair(x, y))[:, 0] - y[:, 0]).square().mean() / 2
    assert close(loss, expected.expand(2))
    assert accuracy.tolist() == [0, 0]


# --- which is chosen, and why ------------------------------------------------------------------------------


def test_the_rule_says_why() -> None:
    assert objective(mlp).description == "all nodes stacked"
    assert "one by one" in objective(cnn).description
    assert objective(cnn).description.endswith("as convolutions want it")


@pytest.mark.parametrize("model", [mlp, cnn])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rule_can_be_overruled_in_both_directions(backend, model) -> None:
    problem = objective(model, backend)
    assert problem.stacked == (backend == "stacked")
    assert problem.description.endswith(f'as backend = "{backend}" asks for')
    assert problem.variant(dtype=torch.float32).stacked == problem.stacked


def test_stacking_what_cannot_be_stacked_is_refused_by_name() -> None:
    layer = r"the model \(WithOwnOperation\)"
    x, y = sequences()
    data = hf.partition(x, y, hf.IID(), nodes=3, seed=0)
    with pytest.raises(
        hf.HoldfastError, match=rf'^backend = "stacked": {layer} .*use backend = "loop"$'
    ) as error:
        hf.train(hf.FedAvg(lr=0.1), model=MODELS["own operation"](), data=data, rounds=1, backend="stacked")
    assert "\n" not in str(error.value)


def test_a_plain_mistake_is_not_blamed_on_the_backend() -> None:
    x, y = sequences()
    data = hf.partition(x[..., :2], y, hf.IID(), nodes=3, seed=0)  # the model reads three features
    with pytest.raises(hf.HoldfastError, match=r"^layer 'read' \(LSTM\) fails on a batch of shape"):
        hf.train(hf.FedAvg(lr=0.1), model=Recurrent(nn.LSTM), data=data, rounds=1, backend="stacked")


def test_training_with_either_backend_is_the_same() -> None:
    x, y = images()
    data = hf.partition(x, y, hf.IID(), nodes=3, seed=0)
    paths = []
    for backend in BACKENDS:
        torch.manual_seed(0)
        options = {"batch_size": 4, "dtype": torch.float64, "backend": backend}
        paths.append(hf.train(hf.SCAFFOLD(lr=0.1), model=cnn(), data=data, rounds=3, **options).models)
    assert close(*paths)


def test_another_backend_is_refused() -> None:
    x, y = images()
    data = hf.partition(x, y, hf.IID(), nodes=3, seed=0)
    with pytest.raises(
        hf.HoldfastError, match="backend: should be 'auto', 'stacked', 'loop' or 'adapters', got"
    ):
        hf.train(hf.FedAvg(lr=0.1), model=softmax(), data=data, rounds=1, backend="vmap")


EXPERIMENT = """
rounds = 1
[problem]
dataset = "digits"
model = "linear"
nodes = 4
backend = "loop"
[network]
topology = "server"
[[algorithm]]
name = "fedavg"
lr = 0.1
"""


def test_an_experiment_file_chooses_too(tmp_path) -> None:
    plan = Plan.of_file(experiment_file(tmp_path, EXPERIMENT), [], None, "cpu")
    [job] = plan.jobs
    assert plan.simulation(job).prepare(1).startswith("nodes one by one")


# --- what backends assume about a batch --------------------------------------------------------------------


class Tokens(NamedTuple):
    """Samples in another form than the source of arrays gives."""

    given: dict[str, Tensor]
    y: Tensor

    @property
    def x(self) -> Tensor:
        return self.given["left"] + self.given["right"]


def test_a_batch_may_be_any_tree() -> None:
    torch.manual_seed(0)
    loss = RowLoss(FlatModel(nn.Linear(4, 3), torch.device("cpu"), torch.float64), CrossEntropy())
    left, right = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    y = torch.arange(15).view(3, 5) % 3
    weight = torch.rand(3, 5, dtype=torch.float64)
    tree, plain = (
        Batch(Tokens({"left": left, "right": right}, y), weight),
        Batch(Pair(left + right, y), weight),
    )
    rows, keys = torch.randn(3, loss.model.dim, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.int64)
    found = []
    for batch in (tree, plain):
        example = tree_map(lambda part: part[0, :1], batch)
        for name in BACKENDS:
            backend = choose_backend(loss, Activations(loss, example, at_once=10), name)
            found.append(backend.values_and_gradients(rows, batch, keys)[1])
            found.append(backend.hessian_products(rows, rows, batch, keys))
    assert all(close(found[i], found[i % 2]) for i in range(8))
    assert found[0].abs().sum() > 0


def test_a_source_may_hold_some_of_equally_large_nodes() -> None:
    x, y = images()
    data = hf.FederatedData(x, y, np.array([5, 5, 5, 5])).hold([1])
    [batch] = ArraySource(data, x).all_of(torch.tensor([1]), at_once=100)
    assert torch.equal(batch.samples.x[0], x[5:10])


def test_a_source_of_its_own_takes_no_options_for_arrays() -> None:
    flat = FlatModel(softmax(), torch.device("cpu"), torch.float64)
    source = ArraySource(hf.FederatedData(*images(), COUNTS), flat.x0, batch_size=4)
    assert ModelProblem(flat, CrossEntropy(), source, seed=0).stochastic
    with pytest.raises(hf.HoldfastError, match="batch_size: only for samples in memory"):
        ModelProblem(flat, CrossEntropy(), source, seed=0, batch_size=8)


class Shared(nn.Module):
    """A layer under two names, and a parameter in two layers, one of which holds it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.same = self.middle
        self.last.weight = self.middle.weight
        self.last.register_parameter("twin", self.middle.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.same(self.middle(self.first(x.flatten(1))))) @ self.last.twin


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_under_two_names(backend) -> None:
    problem = objective(Shared, backend, batch_size=None)
    problem.check_model(None)
    x, nodes = problem.x0.expand(3, -1).contiguous(), torch.arange(3)
    row = problem.x0.clone().requires_grad_()
    parameters = problem.model.parameters(row)
    samples, targets = images()
    outputs = torch.func.functional_call(problem.model.module(problem.x0).double(), parameters, (samples,))
    start, count = int(COUNTS[0]), int(COUNTS[1])
    part = slice(start, start + count)
    value = 3 * count / 20 * nn.functional.cross_entropy(outputs[part], targets[part])
    [expected] = torch.autograd.grad(value, row)
    assert close(problem.full_grads(x, nodes)[1], expected)


class Untraced(CrossEntropy):
    """Fails while torch traces it, and only then."""

    traceable = True
    error: type[Exception]

    def values(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if get_proxy_mode() is not None:
            raise self.error("while traced")
        return super().values(outputs, targets)


def test_only_what_the_tracer_raises_leads_to_the_untraced_gradient(monkeypatch):
    data = hf.FederatedData(*images(), COUNTS)
    x, nodes = torch.zeros(2, 195, dtype=torch.float64), torch.tensor([0, 1])

    def gradients(error: type[Exception]) -> Tensor:
        monkeypatch.setattr(Untraced, "error", error, raising=False)
        problem = hf.build_problem(softmax(), data, loss=Untraced(), dtype=torch.float64)
        for step in range(TRACE_FROM_CALLS):
            [(_, last)] = problem.minibatch_values_and_grads([x], nodes, 0, step)
        return last

    assert gradients(RuntimeError).equal(gradients(TraceError))
    with pytest.raises(KeyError, match="while traced"):
        gradients(KeyError)


class Contiguous(nn.Module):
    """Takes images in torch's usual layout only."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.layers, self.error = cnn(), error

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_contiguous() or x.stride(1) == 1:
            raise self.error("planes apart")
        return self.layers(x)


def test_only_torchs_refusal_of_a_layout_leads_to_the_usual_one() -> None:
    x, nodes = torch.zeros(3, 179, dtype=torch.float64), torch.arange(3)
    refused = objective(partial(Contiguous, RuntimeError))
    expected = objective(partial(Contiguous, RuntimeError), "stacked").full_grads(x, nodes)
    assert close(refused.full_grads(x, nodes), expected)
    broken = objective(partial(Contiguous, KeyError))
    broken.check_model(None)  # in the usual layout nothing is wrong with it
    with pytest.raises(KeyError, match="planes apart"):
        broken.full_grads(x, nodes)
