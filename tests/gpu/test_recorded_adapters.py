"""Adapters on a GPU: recorded rounds with compiled gradients and dropout; these tests need a GPU."""

from __future__ import annotations

import pytest
import torch
from devices import GPU_MARKS
from torch import Tensor, nn
from torch.nn import functional

import holdfast as hf
from holdfast.engines.common.simulation import Simulation
from holdfast.engines.simulate.choice import executor_for
from holdfast.experiments.choices import as_network
from holdfast.experiments.setting import build_problem

pytestmark = GPU_MARKS

NODES, TOKENS, WORDS, WIDTH = 3, 16, 20, 32


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it, whose inputs are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.drop = nn.Dropout(0.1)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(self.drop(x)))


class Attention(nn.Module):
    """A language model of one layer, with the mask of the transformers library."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH).requires_grad_(False)
        self.query, self.key, self.value = Adapted(), Adapted(), Adapted()
        self.head = nn.Linear(WIDTH, WORDS).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        place = torch.arange(TOKENS, device=ids.device)
        mask = (place[None, :] <= place[:, None]).expand(len(ids), 1, -1, -1)
        parts = [
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        ]
        seen = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        return self.head(x + seen.transpose(1, 2).flatten(2))


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["ids"])[:, :-1]
    return functional.cross_entropy(outputs.flatten(0, 1).float(), batch["ids"][:, 1:].flatten())


def simulation(precision: str, executor=None) -> Simulation:
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(5 * node, 5 * node + 10, (8, TOKENS), generator=draw) for node in range(NODES)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Attention()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, precision))
    problem = build_problem(
        model,
        hf.FederatedData.of_nodes([{"ids": text} for text in texts]),
        step=step,
        batch_size=4,
        device="cuda",
        precision=precision,
        backend="adapters",
    )
    method = hf.FedAvg(lr=0.5, local_steps=5)
    return Simulation(method, problem, as_network("server", NODES), seed=7, executor=executor)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("rounds", [1, 10**3])  # recorded as they are; recorded with compiled gradients
def test_recorded_rounds_of_adapters_are_the_same_rounds(precision, tolerance, rounds) -> None:
    plain, recorded = simulation(precision), simulation(precision, executor_for(torch.device("cuda")))
    how = recorded.prepare(rounds)
    assert "CUDA graph" in how
    assert ("only gradients compiled" in how) == (rounds > 1)
    assert "failed" not in how
    start = plain.models.clone()
    for _ in range(3):
        plain.step()
        recorded.step()
    moved = (plain.models - start).norm()
    assert moved > 0
    assert (plain.models - recorded.models).norm() <= tolerance * moved
