"""The registry of models, and what their factories share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

from pydantic import Field
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, check_arguments

MODELS: Registry[nn.Module] = Registry("model", context=("input_shape", "outputs"))

InputShape = Annotated[tuple[Count, ...], Field(min_length=1)]

F = TypeVar("F", bound=Callable[..., nn.Module])


def model(name: str) -> Callable[[F], F]:
    """Decorator: registers a model factory whose arguments are checked however it is called."""

    def decorate(factory: F) -> F:
        signature = inspect.signature(factory)

        @wraps(factory)
        def checked(*args: Any, **kwargs: Any) -> nn.Module:
            given = signature.bind(*args, **kwargs).arguments
            return factory(**check_arguments(f"model {name!r}", factory, given))

        return MODELS.register(name)(checked)  # type: ignore[return-value]  # wraps keeps the signature

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
