"""Models by name: the registry, what their factories share, and a user's own ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, ParamSpec

from pydantic import Field
from torch import nn

from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry, import_named
from holdfast.core.validation import Count, check_arguments, quoted

# --- the registry, and what factories share -------------------------------------------------------------


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


# --- models by name: ours, or ``module:Class`` of the user's own ----------------------------------------


LONGEST_REASON = 500  # characters of another program's message


def load_model(
    name: str, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int | None
) -> nn.Module:
    """The registered model ``name``, or the user's ``module:Class``, made with ``options``.

    A user's class also gets ``input_shape`` and ``outputs`` if its constructor has parameters of these names.
    ``outputs`` may be None, not known, for a class that does not ask for it.
    """
    try:
        return _load(name, options, {"input_shape": input_shape, "outputs": outputs})
    except HoldfastError:
        raise
    except Exception as error:  # whatever the user's code, or torch for want of memory, complains about
        words = str(error).partition("Exception raised from")[0]  # without torch's own stack
        reason = " ".join(words.split())[:LONGEST_REASON]
        raise HoldfastError(f"model {name!r} cannot be made ({type(error).__name__}: {reason})") from error


def _load(name: str, options: Mapping[str, Any], context: Mapping[str, Any]) -> nn.Module:
    if ":" not in name:
        return MODELS.build(name, options, **_known(name, context))
    for key in options:
        if key in context:
            raise HoldfastError(f"model {name!r}: {key!r} comes from the data, leave it out")
    own = import_model(name)
    signature = inspect.signature(own)
    asked = {key: value for key, value in context.items() if key in signature.parameters}
    arguments = {**options, **_known(name, asked)}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise HoldfastError(f"model {name!r}: {error}; its signature is {signature}") from None
    return own(**arguments)


def _known(name: str, context: Mapping[str, Any]) -> Mapping[str, Any]:
    if context.get("outputs", 0) is None:
        raise HoldfastError(
            f"model {name!r}: nobody knows how many classes there are without reading all items; say so, as "
            "in hf.from_datasets(..., classes=10)"
        )
    return context


def import_model(spec: str) -> type[nn.Module]:
    """The class that ``module:Class`` points to, in the current folder or installed.

    It must be a subclass of ``torch.nn.Module``. Any other callable is refused: the name may stand in a file,
    and a file must not be able to call whatever is installed.
    """
    found: type[nn.Module] = import_named("model", spec, "my_models:Net")
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        raise HoldfastError(
            f"model {spec!r}: expected a subclass of torch.nn.Module, got {quoted(found)}; "
            "write a class whose constructor makes the model"
        )
    return found
