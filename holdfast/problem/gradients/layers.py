"""Layers in a form that stacks well."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.problem.gradients.convolution import PixelConv2d, is_regular


class PlaneConv2d(nn.Conv2d):
    """A convolution of a single plane, such as a grey image, as a product of its patches.

    Stacked, a convolution becomes one with a group for every node; if a group has one plane only, it is
    taken for a depthwise convolution, whose GPU kernels are several times slower than this product.
    """

    traceable = True

    def _get_name(self) -> str:
        return "Conv2d"  # what the user calls it, for messages

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or input.shape[1] != 1:
            return super().forward(input)  # which refuses what is no batch of planes
        assert not isinstance(self.padding, str)  # see _is_plane
        down, across = self.padding
        height, width = self.kernel_size
        padded = functional.pad(input[:, 0], (across, across, down, down))  # [B, H, W]
        rows, columns = padded.shape[1] - height + 1, padded.shape[2] - width + 1
        patches = torch.stack(
            [padded[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
        )
        planes = self.weight.flatten(1) @ patches.flatten(1)  # [out, k] @ [k, B rows columns]
        if self.bias is not None:
            planes = planes + self.bias[:, None]
        return planes.view(self.out_channels, len(input), rows, columns).transpose(0, 1)


class NarrowLinear(nn.Linear):
    """A layer with few outputs as weight times inputs, not inputs times weight.

    Stacked, a product whose result has few columns takes up to twice the time of one with few rows; and on
    a GPU, the sums that follow are then compiled to slow kernels.
    """

    traceable = True

    def _get_name(self) -> str:
        return "Linear"

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim < 2 or input.shape[-1] != self.in_features:
            return super().forward(input)  # whose complaint has the shapes as the user knows them
        outputs = (self.weight @ input.mT).mT
        return outputs if self.bias is None else outputs + self.bias


NARROW = 16  # outputs


def ready_to_stack(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` with layers that stack badly on ``device`` replaced, in place; parameters are the same."""
    # Where a part is frozen, its outputs are kept by watching torch's own functions.
    all_trained = all(parameter.requires_grad for parameter in module.parameters())
    for layer in module.modules():
        if type(layer) is nn.Conv2d and device.type == "cuda" and _is_plane(layer):
            layer.__class__ = PlaneConv2d
        if type(layer) is nn.Conv2d and device.type == "cuda" and all_trained and is_regular(layer):
            layer.__class__ = PixelConv2d
        if type(layer) is nn.Linear and layer.out_features <= NARROW:
            layer.__class__ = NarrowLinear
    return module


def _is_plane(layer: nn.Conv2d) -> bool:
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    return plain and layer.in_channels == 1 and not isinstance(layer.padding, str)
