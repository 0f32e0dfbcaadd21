"""The backend ``adapters``: chosen where little is trained, equal to the loop, left where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import every_device
from test_backends import close, images, objective
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.data.samples import Pair
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import gpu_ways
from holdfast.models import Dropout
from holdfast.problem.model_problem import ModelProblem


@pytest.fixture(autouse=True)
def without_features(monkeypatch) -> None:
    """Outputs of a frozen part are not kept: what is left would be too little for this backend."""
    monkeypatch.setattr("holdfast.problem.features.MOST_OF_THE_MODEL", 2.0)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def head_on_images() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(288, 8))
    return nn.Sequential(frozen(body), nn.LayerNorm(8), Dropout(0.2), nn.Linear(8, 3))


def gradients(problem: ModelProblem, x: Tensor, nodes: Tensor, *words: Any) -> Tensor:
    return problem.minibatch_values_and_grads([x], nodes, *words)[0][1]


class BesideFrozen(nn.Module):
    """LoRA as PEFT lays it: a frozen layer plus a product of two narrow ones."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = frozen(layer)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))


def low_rank() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), BesideFrozen(nn.Linear(64, 32)), nn.Tanh(), BesideFrozen(nn.Linear(32, 3))
    )


class Mixing(nn.Module):
    """Samples of a batch see one another."""

    def __init__(self) -> None:
        super().__init__()
        self.body = frozen(nn.Linear(64, 32))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x.flatten(1))
        return self.head(hidden - 0.5 * hidden.mean(0))


class PastItsForward(Mixing):
    """The trained layer is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.body(x.flatten(1)), self.head.weight, self.head.bias)


@every_device
@pytest.mark.parametrize("model", [head_on_images, low_rank])
def test_it_is_chosen_and_agrees_with_the_loop(model, device) -> None:
    chosen, loop = (objective(model, backend, device) for backend in ("auto", "loop"))
    assert chosen.description == "all nodes end to end over one frozen model"
    nodes = torch.tensor([2, 0, 1], device=device)
    draw = torch.Generator().manual_seed(1)
    x, v = (torch.randn(3, chosen.dim, dtype=torch.float64, generator=draw).to(device) for _ in range(2))
    test = chosen.test_set(Pair(*images()))
    for ask in (
        lambda f: f.minibatch_values_and_grads([x, v], nodes, 3, 2)[1][1],
        lambda f: f.minibatch_values_and_grads([x], nodes, 3, 2)[0][0],
        lambda f: f.backend.outputs(x, test),
        lambda f: f.full_grads(x, nodes),
        lambda f: f.values(x, nodes),
        lambda f: f.hessian_products(x, v, nodes),
        lambda f: f.tester.test(x, test)[0],
        lambda f: f.tester.test(x, test)[1],
    ):
        assert close(ask(chosen), ask(loop))


class DroppedOut(nn.Module):
    """Torch's dropout in all places: a layer, twice the same, a function, attention, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.down = frozen(nn.Linear(8, 8)), nn.Linear(8, 2, bias=False)
        self.up, self.drop = nn.Linear(2, 8, bias=False), nn.Dropout(0.3)
        self.trained, self.head = InnerDropout(8), frozen(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x[:, 0])  # [B, 8, 8]
        hidden = self.body(x) + self.up(self.down(self.drop(x)))
        attended = functional.scaled_dot_product_attention(hidden, hidden, hidden, dropout_p=0.2)
        return self.head(functional.dropout1d(self.trained(attended), 0.4).mean(1))


class InnerDropout(nn.Module):
    """A trained layer that is no linear one, and drops in its own forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.25) * self.scale


@every_device
def test_torchs_dropout_draws_for_every_node_what_it_draws_alone(device) -> None:
    chosen, loop = (objective(DroppedOut, backend, device) for backend in ("adapters", "loop"))
    nodes = torch.tensor([2, 0, 1], device=device)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(3, chosen.dim, dtype=torch.float64, generator=draw).to(device)
    for problem in (chosen, objective(DroppedOut, "adapters", device, samples_at_once=8)):
        assert close(gradients(problem, x, nodes, 3, 2), gradients(loop, x, nodes, 3, 2))
    assert close(chosen.values(x, nodes), loop.values(x, nodes))
    assert not close(gradients(chosen, x, nodes, 3, 2), gradients(chosen, x, nodes, 3, 1))


@pytest.mark.parametrize("model", [low_rank, DroppedOut])
def test_compiled_gradients_are_one_program_with_the_same_result(model) -> None:
    problem = objective(model, "adapters")
    x = torch.randn(3, problem.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nodes, words = torch.arange(3), (torch.tensor(2), torch.tensor(1))
    problem.get_ready()
    program = make_fx(
        lambda x: gradients(problem, x, nodes, *words),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
    )(x)
    for at in (x, 2 * x):
        assert close(program(at), gradients(problem, at, nodes, *words))


class AcrossTime(nn.Module):
    """Dropout of a tensor in which time comes first, and then the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = frozen(nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        in_time = self.body(x[:, 0]).transpose(0, 1)  # [8, B, 8]
        return self.head(functional.dropout(in_time, 1e-6, self.training).mean(0))


class Noisy(DroppedOut):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-9 * torch.randn_like(x))


@pytest.mark.parametrize(
    ("model", "why"), [(AcrossTime, "whose first dimension is not that of the samples"), (Noisy, "random")]
)
def test_rows_are_kept_apart_where_random_numbers_would_be_common(model, why) -> None:
    with pytest.raises(HoldfastError, match=why):
        _ = objective(model, "adapters").backend


def test_on_a_gpu_gradients_are_compiled_without_the_updates() -> None:
    """Which are nothing beside the activations, and would need a second program of the whole model."""
    method, network = hf.FedAvg(lr=0.1, local_steps=10), hf.server(3)
    words = [
        [way.words.rpartition(", ")[2] for way in gpu_ways(Simulation(method, problem, network), 1000)]
        for problem in (objective(low_rank), objective(low_rank, "stacked"))
    ]
    assert words == [
        ["only gradients compiled", "not compiled"],
        ["compiled", "only gradients compiled", "not compiled"],
    ]


def test_parts_that_fit_the_memory_give_the_same() -> None:
    whole, parts = objective(low_rank), objective(low_rank, samples_at_once=8)
    x = torch.randn(3, whole.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nodes = torch.arange(3)
    assert close(gradients(whole, x, nodes, 0, 0), gradients(parts, x, nodes, 0, 0))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Mixing, "samples of different nodes would affect one another in one batch"),
        (PastItsForward, "the model cannot take the samples of all nodes as one batch"),
    ],
)
def test_a_model_it_would_be_wrong_for_is_stacked(model, why) -> None:
    chosen, loop = objective(model), objective(model, "loop")
    assert chosen.description.startswith(f"all nodes stacked, as {why}")
    x = torch.randn(3, chosen.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nodes = torch.arange(3)
    assert close(gradients(chosen, x, nodes, 0, 0), gradients(loop, x, nodes, 0, 0))
    with pytest.raises(HoldfastError, match=f'backend = "adapters": {why}.*; use backend = "stacked"'):
        _ = objective(model, "adapters").backend


class NotFinite(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1))) / 0.0


def test_without_a_finite_gradient_nothing_is_known() -> None:
    assert "as the gradient of the first sample is not finite" in objective(NotFinite).description


class OverSequences(nn.Module):
    """A frozen recurrent layer, which torch cannot stack."""

    def __init__(self) -> None:
        super().__init__()
        self.body = frozen(nn.LSTM(8, 8, batch_first=True))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1, 2))[0][:, -1])


def test_a_frozen_layer_that_cannot_be_stacked_is_no_obstacle() -> None:
    chosen, loop = objective(OverSequences), objective(OverSequences, "loop")
    assert chosen.description == "all nodes end to end over one frozen model"
    chosen.check_model(None)
    x = torch.randn(3, chosen.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nodes = torch.arange(3)
    assert close(gradients(chosen, x, nodes, 0, 0), gradients(loop, x, nodes, 0, 0))
    assert close(chosen.full_grads(x, nodes), loop.full_grads(x, nodes))


def test_a_model_that_is_trained_as_a_whole_is_stacked_unless_asked() -> None:
    def whole() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))

    asked, stacked = objective(whole, "adapters"), objective(whole)
    assert stacked.description == "all nodes stacked"
    assert asked.description == 'all nodes end to end over one frozen model, as backend = "adapters" asks for'
    x = torch.randn(3, asked.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    nodes = torch.arange(3)
    assert close(gradients(asked, x, nodes, 0, 0), gradients(stacked, x, nodes, 0, 0))


def test_frozen_weights_are_no_activations() -> None:
    """The backward pass reads the frozen layer of 2048 weights, and keeps a few tensors of 512 at most."""

    def model() -> nn.Module:
        body = frozen(nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4)))
        return nn.Sequential(
            body, nn.Linear(4, 4), nn.Tanh(), frozen(nn.Linear(4, 512)), nn.Tanh(), nn.Linear(512, 3)
        )

    assert objective(model).activations.of_sample < 8 * 2048


def test_the_frozen_part_is_there_once() -> None:
    """For training, for evaluation, and in the copies that compute for all nodes."""
    problem = objective(head_on_images)
    [[training, _], [evaluation, _]] = problem.model.parts
    modules = [training, evaluation, problem.backend._training.module, problem.backend._evaluation.module]
    assert len({module[0][0].weight.data_ptr() for module in modules}) == 1
