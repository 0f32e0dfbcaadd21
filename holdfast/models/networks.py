"""The models of the papers."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count
from holdfast.models.base import InputShape, image_shape, model
from holdfast.models.dropout import Dropout

# --- models that take inputs of any shape, flattened ----------------------------------------------------


Widths = Annotated[list[Count], Field(min_length=1, max_length=1000)]


@model("linear")
def linear(input_shape: InputShape, outputs: Count, bias: bool = True, zero: bool = False) -> nn.Module:
    """One linear layer: logistic regression, support vector machine or least squares, depending on the loss.

    It starts at random, or at ``zero``, as is usual for convex problems.
    """
    layer = nn.Linear(prod(input_shape), outputs, bias=bias)
    if zero:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


@model("mlp")
def mlp(input_shape: InputShape, outputs: Count, hidden: Widths = [500]) -> nn.Module:  # noqa: B006
    """Multilayer perceptron: hidden layers of the given widths, each followed by ReLU."""
    layers: list[nn.Module] = [nn.Flatten()]
    for width_in, width_out in pairwise([prod(input_shape), *hidden]):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))


# --- the small convolutional networks of the papers -----------------------------------------------------


@model("lenet")
def lenet(input_shape: InputShape, outputs: Count) -> nn.Module:
    """LeNet: two 5x5 convolutions with pooling, then 120 and 84 units (62,006 parameters on CIFAR-10)."""
    channels, height, width = _pooled_twice("lenet", input_shape, kernel=5, padding=0)
    return nn.Sequential(
        *_convolution(channels, 6, kernel=5),
        *_convolution(6, 16, kernel=5),
        nn.Flatten(),
        *_dense(16 * height * width, 120),
        *_dense(120, 84),
        nn.Linear(84, outputs),
    )


@model("netfleet-cnn")
def netfleet_cnn(input_shape: InputShape, outputs: Count, padding: Literal[0, 1] = 1) -> nn.Module:
    """The CNN of NET-FLEET: two 3x3 convolutions with pooling, one linear layer (10,330 parameters)."""
    channels, height, width = _pooled_twice("netfleet-cnn", input_shape, kernel=3, padding=padding)
    return nn.Sequential(
        *_convolution(channels, 16, kernel=3, padding=padding),
        *_convolution(16, 16, kernel=3, padding=padding),
        nn.Flatten(),
        nn.Linear(16 * height * width, outputs),
    )


@model("dspodfl-cnn")
def dspodfl_cnn(input_shape: InputShape, outputs: Count) -> nn.Module:
    """The CNN of DSpodFL: LeNet-5 on images enlarged to 32x32, with dropout (61,706 parameters on MNIST)."""
    channels, height, width = image_shape("dspodfl-cnn", input_shape)
    if max(height, width) > 32:
        raise HoldfastError(
            f"model 'dspodfl-cnn' takes images of at most 32x32, got {height}x{width}: shrink them first"
        )
    return nn.Sequential(
        nn.Upsample(size=(32, 32), mode="bilinear"),
        *_convolution(channels, 6, kernel=5),
        *_convolution(6, 16, kernel=5),
        nn.Conv2d(16, 120, kernel_size=5),  # leaves one pixel
        nn.ReLU(),
        nn.Flatten(),
        *_dense(120, 84),
        Dropout(0.5),
        nn.Linear(84, outputs),
    )


@model("femnist-cnn")
def femnist_cnn(input_shape: InputShape, outputs: Count) -> nn.Module:
    """The FEMNIST CNN of LEAF: two 5x5 convolutions with pooling, then 2048 units (6,603,710 parameters)."""
    channels, height, width = _pooled_twice("femnist-cnn", input_shape, kernel=5, padding=2)
    return nn.Sequential(
        *_convolution(channels, 32, kernel=5, padding=2),
        *_convolution(32, 64, kernel=5, padding=2),
        nn.Flatten(),
        *_dense(64 * height * width, 2048),
        nn.Linear(2048, outputs),
    )


def _convolution(channels_in: int, channels_out: int, kernel: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(channels_in, channels_out, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _dense(width_in: int, width_out: int) -> list[nn.Module]:
    return [nn.Linear(width_in, width_out), nn.ReLU()]


def _pooled_twice(name: str, input_shape: tuple[int, ...], kernel: int, padding: int) -> tuple[int, int, int]:
    """Channels of the image, and its height and width after two convolutions, each with 2x2 pooling."""

    def shrink(size: int) -> int:
        return (size + 2 * padding - kernel + 1) // 2

    channels, height, width = image_shape(name, input_shape)
    pooled = channels, shrink(shrink(height)), shrink(shrink(width))
    if min(pooled) < 1:
        raise HoldfastError(
            f"model {name!r} needs larger images than {height}x{width}: choose 'linear' or 'mlp'"
        )
    return pooled


# --- ResNet-18 (He et al., 2016) with group normalisation, which keeps no statistics --------------------


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
        [*_normalised(channels, width, kernel=3), nn.ReLU()]
        if stem == "cifar"
        else [*_normalised(channels, width, kernel=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
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
            *_normalised(channels_in, channels_out, kernel=3, stride=stride),
            nn.ReLU(),
            *_normalised(channels_out, channels_out, kernel=3),
        )
        self.shortcut = (
            nn.Identity()
            if channels_in == channels_out
            else nn.Sequential(*_normalised(channels_in, channels_out, kernel=1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _normalised(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.GroupNorm(2, channels_out)]  # two groups, as is usual in federated learning
