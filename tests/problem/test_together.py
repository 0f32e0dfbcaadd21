"""One call of a model for all nodes: the same gradients as node by node, for every kind of layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from holdfast.models import Dropout
from holdfast.problem.gradients.adapters import Together

NODES, BATCH, WIDTH = 3, 4, 6


def cross_entropy(model: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
    # Labels that are ignored make the nodes' means differ from the mean over all nodes' samples.
    return functional.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)


def batch_of_nodes() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(5, (NODES, BATCH), generator=draw)
    y[1, :2] = -100
    return {"x": torch.randn(NODES, BATCH, WIDTH, dtype=torch.float64, generator=draw), "y": y}


def rows_near(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of every node, all different."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return {name: p + 0.3 * torch.randn(NODES, *p.shape, dtype=p.dtype) for name, p in trained.items()}


def one_by_one(module: nn.Module, step: Any, batch: dict[str, Tensor], rows: dict[str, Tensor]) -> list[Any]:
    def value(own: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return step(lambda *args, **kwargs: functional_call(module, own, args, kwargs), batch)

    nodes = [({k: v[i] for k, v in rows.items()}, {k: v[i] for k, v in batch.items()}) for i in range(NODES)]
    return [grad(value)(*node) for node in nodes]


def task(step: Any) -> Any:
    return lambda run, own, batch: step(lambda *args, **kwargs: run(own, args, kwargs), batch)


def check_same(module: nn.Module, step: Any, batch: dict[str, Tensor]) -> None:
    rows = rows_near(module)
    expected = one_by_one(module, step, batch, rows)
    together = Together(module, list(rows))
    found = grad(lambda rows: together.values(task(step), rows, batch).sum())(rows)
    for name in rows:
        for node in range(NODES):
            torch.testing.assert_close(found[name][node], expected[node][name], rtol=1e-10, atol=1e-12)


def frozen_but(module: nn.Module, *trained: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    return module.double()


@pytest.mark.parametrize(
    "trained", [("0.weight",), ("2.bias",), ("2.weight", "4.bias"), ("1.weight", "1.bias")]
)
def test_layers_have_gradients_as_node_by_node(trained: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    check_same(frozen_but(module, *trained), cross_entropy, batch_of_nodes())


class Words(nn.Module):
    """An embedding whose table is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, ids: Tensor, *, scale: float = 1.0) -> dict[str, Tensor | float]:
        return {"logits": self.head(torch.tanh(self.body(self.table(ids)))) * scale, "scale": scale}


def test_token_losses_arguments_by_name_and_outputs_in_a_dictionary() -> None:
    torch.manual_seed(0)

    def step(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
        outputs = model(batch["ids"], scale=2.0)
        assert outputs["scale"] == 2.0
        return functional.cross_entropy(outputs["logits"].flatten(0, 1), batch["ids"].flatten())

    batch = {"ids": torch.randint(5, (NODES, BATCH, 7))}
    check_same(frozen_but(Words(), "table.weight", "head.weight"), step, batch)


def test_dropout_draws_for_every_node_by_its_key() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 8), Dropout(0.5), nn.Linear(8, 5))
    frozen_but(module, "2.weight")
    batch, rows = batch_of_nodes(), rows_near(module)
    rows["1.key"] = torch.tensor([[7, node, 0, 1] for node in range(NODES)])
    nodes = range(NODES)
    expected = [
        cross_entropy(
            lambda x, node=node: functional_call(module, {k: v[node] for k, v in rows.items()}, (x,)),
            {k: v[node] for k, v in batch.items()},
        )
        for node in nodes
    ]
    together = Together(module, list(rows))
    torch.testing.assert_close(together.values(task(cross_entropy), rows, batch), torch.stack(expected))
    others = rows | {"1.key": rows["1.key"].roll(1, 0)}
    assert not torch.allclose(
        together.values(task(cross_entropy), others, batch), torch.stack(expected), rtol=0.01
    )


def test_a_step_that_leaves_the_model_alone_is_told() -> None:
    module = frozen_but(nn.Sequential(nn.Linear(WIDTH, 5)), "0.weight")
    with pytest.raises(RuntimeError, match="does not call the model"):
        Together(module, ["0.weight"]).values(
            lambda run, own, batch: batch["x"].sum(), rows_near(module), batch_of_nodes()
        )


def test_a_step_that_calls_the_model_twice_is_told() -> None:
    module = frozen_but(nn.Sequential(nn.Linear(WIDTH, 5)), "0.weight")

    def twice(model: Callable[..., Tensor], batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - model(-batch["x"])).square().mean()

    with pytest.raises(RuntimeError, match="calls the model more than once"):
        Together(module, ["0.weight"]).values(task(twice), rows_near(module), batch_of_nodes())
