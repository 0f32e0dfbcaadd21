"""The outputs of a frozen part of a model are kept, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import TensorDataset

import holdfast as hf
from holdfast.data.lazy import LazyData
from holdfast.data.samples import Pair
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for

NODES, SAMPLES, CLASSES = 3, 10, 4
CPU = torch.device("cpu")
KEPT = "outputs of its frozen part kept"


def images(draw: torch.Generator, size: int = SAMPLES) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 3, 6, 6, generator=draw, dtype=torch.float64)
    return x, torch.randint(CLASSES, (size,), generator=draw)


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [images(draw) for _ in range(NODES)]


def head_of(body: nn.Module, *head: nn.Module, width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    body.requires_grad_(False)
    return nn.Sequential(body, *head, nn.Linear(width, CLASSES)).double()


def body(*more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        *more,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class Own(nn.Module):
    """Reads the frozen part twice, and makes tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Linear(36, 8).requires_grad_(False)
        self.mixing = nn.MultiheadAttention(8, 2, batch_first=True).requires_grad_(False)
        self.scale, self.score = nn.Parameter(torch.ones(8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(2)) + torch.arange(x.shape[1], device=x.device)[:, None].to(x.dtype)
        tokens[:, 0] *= 2
        mixed = self.mixing(tokens, tokens, tokens, need_weights=False)[0]
        return self.score(functional.dropout(mixed.mean(1), 0.3, self.training) * self.scale + tokens[:, 1])


def own() -> nn.Module:
    return Own().double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a head": lambda: head_of(body()),
    "a head with dropout": lambda: head_of(body(), nn.Dropout(0.5)),
    "BatchNorm in eval mode": lambda: head_of(body(nn.BatchNorm2d(8).eval())),
    "own code": own,
}


def trained(make: Callable[[], nn.Module], backend: str, **options: Any) -> hf.TrainResult:
    test = images(torch.Generator().manual_seed(5), 7)
    method = hf.LocalGECL(lr=0.1, local_steps=2)
    common: dict[str, Any] = {"topology": "ring", "rounds": 3, "batch_size": 4, "dtype": "float64", "seed": 3}
    return hf.train(method, model=make(), data=data(), test=test, backend=backend, **common | options)


def problem(model: nn.Module, **options: Any) -> Any:
    given = {"batch_size": 4, "dtype": torch.float64} | options
    return hf.build_problem(model, hf.FederatedData.of_nodes(data()), **given)


@pytest.mark.parametrize(("name", "backend"), [(name, "stacked") for name in MODELS] + [("own code", "loop")])
def test_training_is_the_same_with_and_without(name, backend) -> None:
    assert KEPT in problem(MODELS[name]()).description
    kept, plain = (trained(MODELS[name], how) for how in ("auto", backend))
    for column in ("train_loss", "test_accuracy", "average_loss"):
        assert_close(kept.history[column], plain.history[column], rtol=1e-12, atol=1e-12)
    expected = plain.model.state_dict()
    assert list(kept.model.state_dict()) == list(expected)
    for tensor, other in zip(kept.model.state_dict().values(), expected.values(), strict=True):
        assert_close(tensor, other, rtol=1e-12, atol=1e-12)


def test_a_step_does_not_compute_what_is_frozen() -> None:
    objective = problem(head_of(body()))
    rows, nodes = objective.x0.expand(NODES, -1), torch.arange(NODES)
    test = objective.test_set(Pair(*images(torch.Generator().manual_seed(1))))
    for _ in range(2):  # the first time, what is frozen is noted
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            objective.minibatch_values_and_grads([rows], nodes, 0, 0)
            objective.tester.test(rows, test)
    assert not any("convolution" in event.key for event in seen.key_averages())


def test_compiled_rounds_are_the_same(monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda program, inputs: program)
    monkeypatch.setattr("holdfast.engines.simulate.choice.COMPILE_FROM_WORK", 0)
    method, network = hf.LocalGECL(lr=0.1, local_steps=2), hf.Network.of(hf.ring(NODES))
    plain = Simulation(method, problem(MODELS["a head with dropout"](), backend="stacked"), network, seed=0)
    kept = Simulation(
        method, problem(MODELS["a head with dropout"]()), network, seed=0, executor=executor_for(CPU)
    )
    assert f"{KEPT}, 8 numbers a sample, compiled" in kept.prepare(3)
    for _ in range(3):
        plain.step()
        kept.step()
    assert_close(kept.models, plain.models, rtol=1e-12, atol=1e-12)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.say = nn.Linear(36, 8).requires_grad_(False), nn.Linear(8, CLASSES)

    def forward(self, picture: Tensor, shift: Tensor) -> Tensor:
        return self.say(self.look(picture.flatten(2)).mean(1) + shift)


@pytest.mark.parametrize("batch_size", [4, "full"])
def test_columns_and_full_batches(batch_size) -> None:
    draw = torch.Generator().manual_seed(0)
    columns = [
        {"picture": x, "shift": torch.randn(SAMPLES, 8, generator=draw, dtype=torch.float64), "labels": y}
        for x, y in (images(draw) for _ in range(NODES))
    ]
    both = []
    for backend in ("auto", "stacked"):
        torch.manual_seed(0)
        split = hf.FederatedData.of_nodes(columns)
        options = {"batch_size": batch_size, "dtype": torch.float64, "backend": backend}
        objective = hf.build_problem(TwoInputs().double(), split, **options)
        assert (KEPT in objective.description) == (backend == "auto")
        rows, nodes = objective.x0.expand(NODES, -1), torch.arange(NODES)
        [(values, gradients)] = objective.minibatch_values_and_grads([rows], nodes, 1, 1)
        everywhere = objective.global_value_and_grad(objective.x0)
        both.append((values, gradients, objective.values(rows, nodes), *everywhere))
    assert_close(*both, rtol=1e-12, atol=1e-12)


class Reader(nn.Module):
    """A frozen part that decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.score = nn.Linear(36, 8).requires_grad_(False), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(2))
        return self.score(tokens.mean(1) if tokens.sum() > 0 else tokens.amax(1))


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (lambda: head_of(body(nn.Dropout2d(0.5))), {}, "evaluation"),
        (lambda: head_of(body(nn.BatchNorm2d(8))), {}, "BatchNorm takes the statistics of every batch"),
        (lambda: head_of(body(nn.BatchNorm2d(8, track_running_stats=False))), {}, "mixes the samples"),
        (lambda: head_of(body()), {"augment": lambda samples, key: samples}, "samples are augmented"),
        (lambda: Reader().double(), {}, "reads the value of a tensor"),
    ],
    ids=["dropout", "BatchNorm", "batch statistics", "augmentation", "values"],
)
def test_what_cannot_be_kept_is_left_alone_and_told(make, options, why) -> None:
    told = problem(make(), **options).description
    assert KEPT not in told
    assert why in told.split("its frozen part computed in every step, as ")[1]


def test_a_dataset_and_a_step_of_your_own_are_left_alone() -> None:
    lazy = LazyData([TensorDataset(*part) for part in data()])
    options = {"batch_size": 4, "dtype": torch.float64}
    assert hf.build_problem(head_of(body()), lazy, **options).description.count(
        "samples are read when they are drawn"
    )

    def own_step(model: nn.Module, batch: Pair) -> Tensor:
        return functional.cross_entropy(model(batch.x), batch.y)

    assert "own_step calls the model" in problem(head_of(body()), step=own_step).description


def test_features_larger_than_memory_allows_are_not_kept(monkeypatch) -> None:
    monkeypatch.setattr("holdfast.problem.features.SHARE_FOR_FEATURES", 1e-15)
    assert "its outputs would take" in problem(head_of(body())).description


def test_a_backend_that_is_asked_for_computes_the_whole_model() -> None:
    objective = problem(head_of(body()), backend="adapters")
    assert "frozen part" not in objective.description
    assert objective.source is objective.given


def test_nothing_is_said_where_most_of_the_model_trains() -> None:
    model = head_of(body())
    model[0][0].requires_grad_(True)
    assert "frozen" not in problem(model).description
