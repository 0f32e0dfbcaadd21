"""The kernels for stacked convolutions against cuDNN's."""

import pytest
import torch
from torch.testing import assert_close

from holdfast.engines.simulate.executors import convolutions  # noqa: F401  (registers the operations)

pytestmark = pytest.mark.gpu

OPERATIONS = torch.ops.holdfast


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("channels", "results", "kernel", "stride", "padding", "dilation"),
    [
        (3, 16, 3, 1, 1, 1),
        (16, 32, 3, 2, 1, 1),
        (16, 32, 1, 2, 0, 1),
        (40, 70, 3, 1, 2, 2),
        (6, 16, 5, 1, 0, 1),
    ],
)
def test_kernels_agree_with_cudnn(channels, results, kernel, stride, padding, dilation, dtype) -> None:
    groups, draw = 5, torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3, groups * channels, 13, 11, generator=draw, device="cuda").to(dtype)
    weight = torch.randn(groups * results, channels, kernel, kernel, generator=draw, device="cuda").to(dtype)
    how = ([stride] * 2, [padding] * 2, [dilation] * 2, groups)
    exact, options = [x.double(), weight.double()], (*how[:3], False, [0, 0], groups)
    expected = torch.ops.aten.convolution(*exact, None, *options)
    slopes = torch.randn(expected.shape, generator=draw, device="cuda").to(dtype)
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(
        slopes.double(), *exact, None, *options, [True, True, False]
    )
    close = {"rtol": 2e-2, "atol": 2e-2 * float(expected.std())}
    assert_close(OPERATIONS.convolution(x, weight, *how).double(), expected, **close)
    got = OPERATIONS.convolution_of_inputs(slopes, weight, list(x.shape), *how)
    assert_close(got.double(), of_x, rtol=2e-2, atol=2e-2 * float(of_x.std()))
    got = OPERATIONS.convolution_of_weights(slopes, x, list(weight.shape), *how)
    assert_close(got.double(), of_weight, rtol=2e-2, atol=2e-2 * float(of_weight.std()))
