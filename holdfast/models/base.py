"""The registry of models, and what their factories share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, ParamSpec

from pydantic import Field
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, check_arguments

MODELS: Registry[nn.Module] = Registry("model", context=("input_shape", "outputs"))

InputShape = Annotated[tuple[Count, ...], Field(min_length=1)]

P = ParamSpec("P")


def model(name: str) -> Callable[[Callable[P, nn.Module]], Callable[P, nn.Module]]:
    """Decorator: registers a model factory whose arguments are checked however it is called."""

    def decorate(factory: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
        signature = inspect.signature(factory)
        make: Callable[..., nn.Module] = factory

        @wraps(factory)
        def checked(*args: P.args, **kwargs: P.kwargs) -> nn.Module:
            given = signature.bind(*args, **kwargs).arguments
            return make(**check_arguments(f"model {name!r}", factory, given))

        return MODELS.register(name)(checked)

    return decorate


def image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width of the images that model ``name`` takes, or an error."""
    if len(input_shape) != 3:
        raise HoldfastError(
            f"model {name!r} takes images of shape (channels, height, width), got {input_shape}: "
            "choose 'linear' or 'mlp', or reshape the data"
        )
    channels, height, width = input_shape
    return channels, height, width
