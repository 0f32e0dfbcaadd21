"""Traced attention: a mask that is causal whatever the inputs is told as such, and others are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.engines.simulate.executors.tracing import traced

TOKENS = 6
Mask = Callable[[Tensor], Tensor]


def causal(x: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    return (place[None, :] <= place[:, None]).expand(len(x), 1, -1, -1)


def causal_scores(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype).where(causal(x), -torch.inf)


def soft(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype).where(causal(x), -3.0)


def window(x: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    return causal(x) & (place[None, :] > place[:, None] - 3)


def by_inputs(x: Tensor) -> Tensor:
    return causal(x) & (x[:, :1, :1, :1] > -torch.inf)


def by_chance(x: Tensor) -> Tensor:
    return causal(x) & (torch.rand(TOKENS, TOKENS) > -1)


def overwritten(x: Tensor) -> Tensor:
    mask = causal(x).clone()
    mask[:, :, :2].logical_or_(x[:, :1, :2, :1] > -torch.inf)
    return mask


def gradient_with(mask: Mask) -> Callable[[Tensor], Tensor]:
    def gradient(x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            outputs = functional.scaled_dot_product_attention(x, x, x, mask(x))
            return torch.autograd.grad(outputs.square().sum(), x)[0]

    return gradient


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (causal, True),
        (causal_scores, True),
        *((other, False) for other in (soft, window, by_inputs, by_chance, overwritten)),
    ],
)
def test_only_a_mask_that_is_always_causal_is_told(mask, told) -> None:
    x = torch.randn(2, 3, TOKENS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradient = gradient_with(mask)
    program = traced(gradient, [x])
    kernels = [node for node in program.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert [kernel.kwargs["attn_mask"] is None for kernel in kernels] == [told, told]  # there and back
    for given in (x, -x):
        with torch.no_grad():
            torch.testing.assert_close(program(given), gradient(given), rtol=1e-10, atol=1e-12)
