"""The small convolutional networks of the papers."""

from __future__ import annotations

from typing import Literal

from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count
from holdfast.models.base import InputShape, image_shape, model
from holdfast.models.dropout import Dropout


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
