"""Models that take inputs of any shape, flattened."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from holdfast.core.validation import Count
from holdfast.models.base import InputShape, model

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
