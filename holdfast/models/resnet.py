"""ResNet-18 (He et al., 2016) with group normalisation, which keeps no statistics."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count
from holdfast.models.base import InputShape, image_shape, model


@model("resnet18")
def resnet18(
    input_shape: InputShape,
    outputs: Count,
    stem: Literal["cifar", "imagenet"] = "cifar",
    width: Count = 64,
) -> nn.Module:
    """ResNet-18 with GroupNorm, 11.2 M parameters; the stem keeps ("cifar") or quarters the resolution."""
    channels, _, _ = image_shape("resnet18", input_shape)
    if width % 2:
        raise HoldfastError(f"model 'resnet18'.width: should be even (two normalisation groups), got {width}")
    entry = (
        [*_convolution(channels, width, kernel=3), nn.ReLU()]
        if stem == "cifar"
        else [*_convolution(channels, width, kernel=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    )
    return nn.Sequential(
        *entry,
        _Block(width, width),
        _Block(width, width),
        _Block(width, 2 * width, stride=2),
        _Block(2 * width, 2 * width),
        _Block(2 * width, 4 * width, stride=2),
        _Block(4 * width, 4 * width),
        _Block(4 * width, 8 * width, stride=2),
        _Block(8 * width, 8 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, outputs),
    )


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut around them."""

    traceable = True

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels_in, channels_out, kernel=3, stride=stride),
            nn.ReLU(),
            *_convolution(channels_out, channels_out, kernel=3),
        )
        self.shortcut = (
            nn.Identity()
            if channels_in == channels_out
            else nn.Sequential(*_convolution(channels_in, channels_out, kernel=1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(2, channels_out)]  # two groups, as is usual in federated learning
