"""Stacked convolutions in programs that are compiled."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from holdfast.engines.simulate.executors import convolutions

NODES, IMAGES = 3, 4


def model(bias: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, bias=bias),
        nn.ReLU(),
        nn.Conv2d(5, 4, (3, 2), stride=(2, 1), dilation=2, padding=(2, 1), bias=bias),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1, stride=2, bias=bias),
        nn.Flatten(),
        nn.Linear(6 * 2 * 3, 1, bias=bias),
    ).double()


def stacked_gradients(module: nn.Module):
    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(module, weights, (x,)).square().mean()

    return vmap(grad(loss))


@pytest.mark.parametrize("bias", [False, True])
def test_a_program_with_own_convolutions_computes_the_same(bias, monkeypatch) -> None:
    def suits(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> bool:
        return groups == NODES and not transposed

    monkeypatch.setattr(convolutions, "suits", suits)
    module, draw = model(bias), torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(NODES, *p.shape, generator=draw, dtype=torch.float64)
        for name, p in module.named_parameters()
    }
    x = torch.randn(NODES, IMAGES, 2, 7, 5, generator=draw, dtype=torch.float64)
    gradients = stacked_gradients(module)
    program = convolutions.with_own_convolutions(make_fx(gradients)(weights, x))
    assert "aten.convolution" not in program.code
    for name, times in [("convolution.", 3), ("convolution_of_inputs", 2), ("convolution_of_weights", 3)]:
        assert program.code.count(f"holdfast.{name}") == times
    assert_close(program(weights, x), gradients(weights, x), rtol=1e-12, atol=1e-12)


def test_other_convolutions_stay_as_they_are() -> None:
    module = nn.Conv2d(4, 4, 3, groups=2)
    program = make_fx(lambda x: module(x))(torch.ones(1, 4, 5, 5))
    assert "aten.convolution.default" in convolutions.with_own_convolutions(program).code
