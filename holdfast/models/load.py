"""Models by name: ours, or ``module:Class`` of the user's own."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from holdfast.errors import HoldfastError, unknown
from holdfast.models.base import MODELS
from holdfast.validation import quoted


def load_model(
    name: str, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int
) -> nn.Module:
    """The registered model ``name``, or the user's ``module:Class``, made with ``options``.

    A user's class also gets ``input_shape`` and ``outputs`` if its constructor has parameters of these names.
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
    own = import_model(name)
    signature = inspect.signature(own)
    arguments = {**options, **{key: value for key, value in context.items() if key in signature.parameters}}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HoldfastError(f"model {name!r}: {error}; its signature is {signature}") from None
    return own(**arguments)


def import_model(spec: str) -> type[nn.Module]:
    """The class that ``module:Class`` points to, in the current folder or installed.

    It must be a subclass of ``torch.nn.Module``. Any other callable is refused: the name may stand in a file,
    and a file must not be able to call whatever is installed.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise HoldfastError(f"model {spec!r}: expected module:Class, for example my_models:Net")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not search the current folder by itself
    try:
        module = import_module(module_name)
    except Exception as error:
        raise HoldfastError(
            f"model {spec!r}: cannot import {module_name!r} in the current folder or the installed packages "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"name in module {module_name!r}", attribute, public)
    found = getattr(module, attribute)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise HoldfastError(
            f"model {spec!r}: expected a subclass of torch.nn.Module, got {quoted(found)}; "
            "write a class whose constructor makes the model"
        )
    return found
