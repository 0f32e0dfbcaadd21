"""Dropout of torch, wherever it is called: masks from our counters, alike in every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from devices import every_device
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import holdfast as hf
from holdfast.core.randomness import RandomStream, philox
from holdfast.models import CountedDropout

DRAW = torch.Generator().manual_seed(0)
KEY = torch.tensor([1, 2, 3, 4])
X = torch.randn(3, 4, 5, dtype=torch.float64, generator=DRAW)


class Attending(nn.Module):
    """Attention by ``how``, then dropout in a user's own forward; one layer is called twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inside = how, nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True)
        self.read = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.drop, self.score = nn.Dropout(0.4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.inside(self.drop(x)))
        if self.how == "weights":
            x = self.attend(x, x, x)[0]
        elif self.how == "no weights":
            x = self.attend(x, x, x, need_weights=False)[0]
        elif self.how == "sdpa":
            p = 0.5 if self.training else 0.0
            x = functional.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=True)
        elif self.how == "layer":
            x = self.block(x)
        elif self.how == "lstm":
            x = self.read(x)[0]
        elif self.how == "channels":
            x = functional.dropout1d(x, 0.5, self.training)
        return self.score(functional.dropout(x.mean(1), 0.3, self.training))


HOWS = ["plain", "weights", "no weights", "sdpa", "layer", "channels", "lstm"]


def problem_of(model: nn.Module, **options: Any) -> Any:
    nodes = [
        (torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(i)), torch.arange(6) % 3)
        for i in range(3)
    ]
    options = {"dtype": torch.float64, "batch_size": 4, "seed": 5} | options
    problem = hf.build_problem(model, hf.FederatedData.of_nodes(nodes), **options)
    problem.check_model()
    return problem


@every_device
@pytest.mark.parametrize("how", HOWS)
def test_every_backend_drops_the_same(how, device) -> None:
    torch.manual_seed(0)
    model = Attending(how)
    before, gradients = torch.get_rng_state(), {}
    nodes = torch.arange(3, device=device)
    for backend in ("stacked", "loop"):
        problem = problem_of(model, backend=backend, device=device)
        x = problem.x0.expand(3, -1).contiguous()
        gradients[backend] = problem.minibatch_values_and_grads([x], nodes, 1, 2)[0][1]
        again = problem_of(model, backend=backend, device=device)
        alone = again.minibatch_values_and_grads([x[:1]], nodes[1:2], 1, 2)[0][1]
        assert torch.allclose(alone[0], gradients[backend][1], rtol=1e-9, atol=1e-12)
        other = problem.minibatch_values_and_grads([x], nodes, 1, 3)[0][1]
        assert not torch.allclose(other, gradients[backend])
    assert torch.allclose(gradients["stacked"], gradients["loop"], rtol=1e-9, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), before)  # torch's own generator is left alone


def counted(function: Any, *args: Any) -> Tensor:
    with CountedDropout(KEY):
        return function(*args)


def mask(shape: Any, p: float, call: int = 0) -> Tensor:
    """Element i is decided by half-word i of Philox with seven rounds."""
    blocks = torch.arange(-(-torch.Size(shape).numel() // 8))
    words = philox((blocks, 4, 3, 2), (1, RandomStream.DRAW + call), rounds=7).flatten().tolist()
    halves = [half for word in words for half in (word % 2**16, word // 2**16)]
    return torch.tensor(halves[: torch.Size(shape).numel()]).view(shape) >= p * 2**16


def test_masks_by_hand() -> None:
    p = 0.3
    expected = torch.where(mask(X.shape, p), X / (1 - p), 0)
    for drop in (nn.Dropout(p), lambda x: functional.dropout(x, p), lambda x: torch.dropout(x, p, True)):
        assert torch.equal(counted(drop, X), expected)
    whole = torch.where(mask((3, 4, 1), p), X / (1 - p), 0)
    assert torch.equal(counted(nn.Dropout1d(p), X), whole)
    changed = X.clone()
    counted(nn.Dropout(p, inplace=True), changed)
    assert torch.equal(changed, expected)
    assert torch.equal(counted(nn.Dropout(p).eval(), X), X)
    assert not counted(nn.Dropout(1.0), X).any()
    with CountedDropout(KEY):
        first, second = functional.dropout(X, p), functional.dropout(X, p)
    assert torch.equal(first, expected)
    assert torch.equal(second, torch.where(mask(X.shape, p, 1), X / (1 - p), 0))


@pytest.mark.parametrize("layer", [nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)])
def test_alpha_dropout_keeps_mean_and_variance(layer) -> None:
    x = torch.randn(400, 500, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dropped = counted(layer, x)
    assert dropped.mean().item() == pytest.approx(0, abs=0.02)
    assert dropped.std().item() == pytest.approx(1, abs=0.02)
    assert dropped.unique(return_counts=True)[1].max().item() / x.numel() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_averages_to_attention(causal) -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=DRAW)
    attend = functional.scaled_dot_product_attention
    expected = attend(query, query, query, is_causal=causal)
    many = query.expand(20_000, 2, 3, 4)
    dropped = counted(lambda: attend(many, many, many, dropout_p=0.2, is_causal=causal))
    assert (dropped.mean(0) - expected[0]).abs().max() < 0.03
    assert (dropped[0] - expected[0]).abs().max() > 0.03


def test_a_trained_model_keeps_the_users_dropout() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = [(torch.randn(8, 4, generator=DRAW), torch.arange(8) % 3) for _ in range(2)]
    result = hf.train(hf.FedAvg(lr=0.1), model=model, data=data, rounds=2, batch_size=4)
    assert type(result.model[1]) is nn.Dropout
    assert result.model[1].p == 0.5


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.first(x.mean(1)), use_reentrant=self.reentrant)


def test_checkpointed_parts_find_the_parameters_of_their_row() -> None:
    torch.manual_seed(0)
    model = Checkpointed(0.0)
    problem = problem_of(model)
    assert not problem.stacked
    plain = problem_of(nn.Sequential(MeanOver(), model.first, *model.body))
    x = torch.randn(3, problem.dim, dtype=torch.float64, generator=DRAW)
    nodes = torch.arange(3)
    expected = plain.minibatch_values_and_grads([x], nodes, 1, 2)[0][1]
    gradients = problem.minibatch_values_and_grads([x], nodes, 1, 2)[0][1]
    assert torch.allclose(gradients, expected, rtol=1e-9, atol=1e-12)
    gradient = plain.global_value_and_grad(x[0])[1]
    assert torch.allclose(problem.global_value_and_grad(x[0])[1], gradient, rtol=1e-9, atol=1e-12)


def test_reentrant_checkpointing_is_refused_with_what_to_do() -> None:
    with pytest.raises(hf.HoldfastError, match="set use_reentrant=False") as error:
        problem_of(Checkpointed(0.0, reentrant=True))
    assert "\n" not in str(error.value)


class MeanOver(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def test_checkpointing_with_dropout_says_so() -> None:
    with pytest.raises(hf.HoldfastError, match="gradient checkpointing of a part with dropout"):
        problem_of(Checkpointed(0.5))


class AlwaysDropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.score(x.flatten(1)), 0.5)


def test_dropout_in_evaluation_names_itself() -> None:
    with pytest.raises(hf.HoldfastError, match=r"AlwaysDropping.*in eval mode.*training=self.training"):
        problem_of(AlwaysDropping())
