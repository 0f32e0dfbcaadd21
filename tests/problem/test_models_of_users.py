"""Models as users bring them: frozen parts, tied weights, several inputs, dictionaries, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
from holdfast.problem.flat import FlatModel

DRAW = torch.Generator().manual_seed(0)


def test_a_frozen_part_is_kept_once() -> None:
    body, head = nn.Linear(4, 8).bfloat16().requires_grad_(False), nn.Linear(8, 3)
    flat = FlatModel(nn.Sequential(body, nn.BatchNorm1d(8).eval(), head), torch.device("cpu"), torch.float32)
    copies = [flat, flat.copy(), flat.copy().copy()]
    modules = [part for one in copies for part, _ in one.parts]
    assert {module[0].weight.data_ptr() for module in modules} == {body.weight.data_ptr()}
    assert len({module[1].running_mean.data_ptr() for module in modules}) == 1
    assert {module[0].weight.dtype for module in modules} == {torch.bfloat16}
    assert len({id(module) for module in modules}) == 6


def test_another_number_type_leaves_the_users_frozen_part_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Linear(8, 3))
    flat = FlatModel(model, torch.device("cpu"), torch.float64)
    assert {part[0].weight.dtype for part, _ in flat.parts} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Language(nn.Module):
    """A small language model: the output weights are those of the embedding; two inputs, a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        inner = self.block(self.embed(tokens), src_key_padding_mask=~mask)
        return {"logits": self.head(inner), "inner": inner}


def texts() -> list[Any]:
    nodes = []
    for _ in range(3):
        tokens = torch.randint(7, (6, 5), generator=DRAW)
        mask = torch.arange(5) < torch.randint(2, 6, (6, 1), generator=DRAW)
        nodes.append(((tokens, mask), torch.where(mask, tokens.roll(-1, 1), -100)))
    return nodes


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_tied_weights_attention_and_two_inputs(backend) -> None:
    torch.manual_seed(0)
    data, model = texts(), Language()
    problem = hf.build_problem(
        model, hf.FederatedData.of_nodes(data), dtype=torch.float64, batch_size="full", backend=backend
    )
    problem.check_model()
    x = problem.x0.expand(3, -1).contiguous()
    gradients = problem.full_grads(x, problem.here)
    for ((tokens, mask), targets), gradient in zip(data, gradients, strict=True):
        module = problem.model.module(problem.x0).double()
        assert module.head.weight is module.embed.weight
        scores = module(tokens, mask)["logits"]
        each = [functional.cross_entropy(s, t) for s, t in zip(scores, targets, strict=True)]
        torch.stack(each).mean().backward()
        expected = torch.cat([p.grad.flatten() for p in module.parameters()])
        assert torch.allclose(gradient, expected, rtol=1e-8, atol=1e-11)
    accuracy, loss = problem.tester.test(x, problem.test_set(hf.FederatedData.of_nodes(data[:1]).samples))
    assert torch.isfinite(loss).all()
    assert (accuracy >= 0).all()
