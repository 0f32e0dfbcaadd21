"""Models by name: ours, or ``module:Class`` of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.user_code import import_named
from holdfast.models.base import MODELS


def load_model(
    name: str, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int
) -> nn.Module:
    """The registered model ``name``, or the user's ``module:Class``, made with ``options``.

    A user's class or function also gets ``input_shape`` and ``outputs`` if it has parameters of these names.
    """
    try:
        return _load(name, options, {"input_shape": input_shape, "outputs": outputs})
    except HoldfastError:
        raise
    except Exception as error:  # whatever the user's code, or torch for want of memory, complains about
        reason = " ".join(str(error).split())
        raise HoldfastError(f"model {name!r} cannot be made ({type(error).__name__}: {reason})") from error


def _load(name: str, options: Mapping[str, Any], context: Mapping[str, Any]) -> nn.Module:
    if ":" not in name:
        return MODELS.build(name, options, **context)
    for key in options:
        if key in context:
            raise HoldfastError(f"model {name!r}: {key!r} comes from the data, leave it out")
    maker = import_model(name)
    signature = inspect.signature(maker)
    arguments = {**options, **{key: value for key, value in context.items() if key in signature.parameters}}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HoldfastError(f"model {name!r}: {error}; its signature is {signature}") from None
    made = maker(**arguments)
    if not isinstance(made, nn.Module):
        raise HoldfastError(f"model {name!r} must give a torch.nn.Module, got {type(made).__name__}")
    return made


def import_model(spec: str) -> Callable[..., nn.Module]:
    """The class or factory function that ``module:name`` points to, in the current folder or installed."""
    maker: Callable[..., nn.Module] = import_named("model", spec, "my_models:Net")
    if not callable(maker) or (inspect.isclass(maker) and not issubclass(maker, nn.Module)):
        raise HoldfastError(
            f"model {spec!r}: expected a subclass of torch.nn.Module or a function, got {maker!r}"
        )
    return maker
