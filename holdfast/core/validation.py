"""Parameter types with ranges, and one-line errors for values outside them.

Every public dataclass and factory of holdfast annotates its parameters with these types; pydantic does the
checking, whether a value comes from Python, from a TOML file or from the command line.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from holdfast.core.errors import HoldfastError, unknown


def _of_python(value: Any) -> Any:
    """A whole number of numpy as one of Python; anything else as it is."""
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, Integral) else value


Int = Annotated[int, BeforeValidator(_of_python)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[Int, Field(ge=1)]
Whole = Annotated[Int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
Share = Probability  # of a whole
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
Cohort = Count | Literal["all"]  # clients that take part in a round

LONGEST_REPR = 80  # characters of a value quoted in an error


class Section(BaseModel):
    """A table of a file, with these keys and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    moved: ClassVar[Mapping[str, str]] = {}  # keys of older versions: what to write instead, in one line

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The section with what is ``given``, or a one-line error that starts with the key."""
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise HoldfastError(f"{place(error.errors()[0]['loc'])}: {explain(error)}") from None


def check(where: str, annotation: Any, value: Any) -> Any:
    """``value`` as ``annotation`` demands, or a one-line error that starts with ``where``."""
    try:
        return _adapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        raise HoldfastError(f"{where}: {explain(error)}") from None


def accepts(annotation: Any, value: Any) -> bool:
    """Whether ``value`` is what ``annotation`` demands."""
    try:
        _adapter(annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def explain(error: ValidationError) -> str:
    """The first complaint of a pydantic error, in one line: what is allowed and what was given."""
    first, *others = error.errors()
    if first["type"] == "missing":
        return "is missing"
    if first["type"] == "value_error":  # an error of our own, which says all
        return first["msg"].removeprefix("Value error, ")
    words = [
        other["ctx"]["expected"]  # the choices of a union such as int | Literal["full"]
        for other in others
        if other["type"] == "literal_error" and place(other["loc"]) == place(first["loc"])
    ]
    message = re.sub(r"^\w+ should", "should", first["msg"]).partition(" after validation")[0]
    return f"{' or '.join([message, *words])}, got {quoted(first['input'])}"


def place(location: tuple[int | str, ...]) -> str:
    """Where in a table pydantic found a mistake, such as ``network.cohort``, without its names of types."""
    return ".".join(str(part) for part in location if isinstance(part, int) or part.isidentifier())


def quoted(value: Any) -> str:
    """``repr(value)`` in part of a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 3]}..."


def check_arguments(where: str, target: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for ``target``, each checked against its annotation; none unknown, none missing."""
    allowed = parameters(target)
    for name in given:
        if name not in allowed:
            raise unknown(f"key in {where}", name, allowed)
    for name, parameter in allowed.items():
        if parameter.default is inspect.Parameter.empty and name not in given:
            raise HoldfastError(f"{where}: the value {name!r} is missing")
    annotations = hints(target)
    return {
        name: check(f"{where}.{name}", annotations.get(name, Any), value) for name, value in given.items()
    }


def check_fields(where: str, instance: Any) -> None:
    """Checks (and converts) the fields of a frozen dataclass in place; call it from ``__post_init__``."""
    annotations = hints(type(instance))
    for name in parameters(type(instance)):
        object.__setattr__(
            instance, name, check(f"{where}.{name}", annotations[name], getattr(instance, name))
        )


def parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The named parameters of a dataclass or function."""
    return dict(inspect.signature(target).parameters)


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a dataclass or function, evaluated."""
    return _hints(target)


@cache  # schedules are checked in every round
def _hints(target: Any) -> dict[str, Any]:
    return get_type_hints(target, include_extras=True)


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # pydantic models and dataclasses bring a config of their own
        return TypeAdapter(annotation)
