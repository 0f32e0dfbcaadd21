"""Convolutions of all nodes at once against torch's."""

from __future__ import annotations

import pytest
import torch
from devices import on_gpu
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

from holdfast.problem.gradients import convolution
from holdfast.problem.gradients.convolution import PixelConv2d, is_regular

NODES, BATCH = 3, 2
CASES = [  # planes, outputs, kernel, stride, padding
    (3, 4, 3, 1, 1),
    (9, 5, 3, 1, 1),
    (4, 6, 3, 2, 1),
    (4, 6, 1, 2, 0),
    (2, 3, 5, 3, 1),
    (2, 3, 5, 1, 0),
]


def layers(case: tuple[int, ...], dtype: torch.dtype, device: str):
    planes, outputs, kernel, stride, padding = case
    theirs = nn.Conv2d(planes, outputs, kernel, stride, padding).to(device, dtype)
    ours = nn.Conv2d(planes, outputs, kernel, stride, padding).to(device, dtype)
    assert is_regular(ours)
    ours.__class__ = PixelConv2d
    draw = torch.Generator().manual_seed(0)
    given = [
        torch.randn(NODES, *shape, generator=draw, dtype=torch.float64).to(device, dtype)
        for shape in ((BATCH, planes, 9, 8), ours.weight.shape, ours.bias.shape)
    ]
    return theirs, ours, given


def value(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (functional_call(layer, {"weight": weight, "bias": bias}, (x,)) ** 3).sum()


def first(layer: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
    return grad(lambda *given: value(layer, *given), argnums=(0, 1, 2))(*given)


def second(layer: nn.Module, *given: Tensor) -> tuple[Tensor, ...]:
    square = lambda *given: sum((part**2).sum() for part in first(layer, *given))  # noqa: E731
    return grad(square, argnums=(0, 1, 2))(*given)


def in_forward_mode(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The second derivative in the bias as torch's Hessians compute it, forwards over backwards."""
    return hessian(lambda bias: value(layer, x, weight, bias))(bias)


def mapped(function, layer: nn.Module, given: list[Tensor], dims=0):
    return vmap(lambda *given: function(layer, *given), in_dims=dims)(*given)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_derivatives_are_those_of_torch(case) -> None:
    theirs, ours, given = layers(case, torch.float64, "cpu")
    for function in (first, second, in_forward_mode):
        for got, expected in zip(mapped(function, ours, given), mapped(function, theirs, given), strict=True):
            assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10)


def test_what_all_nodes_share_is_not_mapped() -> None:
    theirs, ours, tensors = layers(CASES[2], torch.float64, "cpu")
    for dims in ((None, 0, None), (0, None, None)):
        given = [part if dim == 0 else part[0] for part, dim in zip(tensors, dims, strict=True)]
        got, expected = mapped(value, ours, given, dims), mapped(value, theirs, given, dims)
        assert torch.allclose(got, expected, rtol=1e-12)


def test_other_convolutions_stay_as_they_are() -> None:
    for options in ({"groups": 2}, {"dilation": 2}, {"stride": (1, 2)}, {"padding": "same"}, {"padding": 3}):
        assert not is_regular(nn.Conv2d(4, 4, 3, **options))


@on_gpu
@pytest.mark.parametrize("case", [*CASES, (70, 130, 3, 2, 1), (130, 70, 1, 1, 0)], ids=str)
def test_own_kernels_compute_the_same(case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "MANY", 0)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        _, ours, given = layers(case, torch.float32, "cuda")
        found = mapped(first, ours, given)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    theirs = layers(case, torch.float64, "cpu")[0]
    expected = mapped(first, theirs, [part.double().cpu() for part in given])
    for got, right in zip(found, expected, strict=True):
        assert (got.double().cpu() - right).norm() <= 1e-5 * right.norm()
