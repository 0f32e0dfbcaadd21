"""Named things: algorithms, topologies, data sets, models, partitions, losses.

Whatever is registered here can be chosen by name in an experiment file, with its parameters checked, and is
listed by ``holdfast list``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Generic, TypeVar, cast

from holdfast.core.errors import unknown
from holdfast.core.validation import check_arguments, parameters

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Maps names to dataclasses or factory functions that make a ``T``.

    ``context`` names the parameters that the program supplies itself (say, the number of nodes); they are
    neither listed nor accepted from a configuration.
    """

    def __init__(self, kind: str, context: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.context = context
        self._makers: dict[str, Callable[..., T]] = {}
        self._notes: dict[str, dict[str, str]] = {}

    def register(self, name: str, **notes: str) -> Callable[[F], F]:
        """Decorator: makes the class or function available as ``name``; ``notes`` are listed with it."""

        def add(maker: F) -> F:
            if name in self._makers:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._makers[name] = maker
            self._notes[name] = notes
            return maker

        return add

    def register_checked(self, name: str, **notes: str) -> Callable[[F], F]:
        """As ``register``, for a function that people also call: its arguments are checked then, too."""

        def add(function: F) -> F:
            @wraps(function)
            def checked(*args: Any, **kwargs: Any) -> Any:
                given = inspect.signature(function).bind(*args, **kwargs).arguments
                return function(**check_arguments(f"{self.kind} {name!r}", function, given))

            return self.register(name, **notes)(cast(F, checked))

        return add

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._makers))

    def __getitem__(self, name: str) -> Callable[..., T]:
        if not isinstance(name, str) or name not in self._makers:
            raise unknown(self.kind, name, self._makers)
        return self._makers[name]

    def build(self, name: str, given: Mapping[str, Any], **context: Any) -> T:
        """The thing called ``name`` with checked parameters ``given`` and the program's own ``context``."""
        maker = self[name]
        accepted = parameters(maker)
        for key in given:
            if key in self.context or key not in accepted:
                raise unknown(f"key in {self.kind} {name!r}", key, set(accepted) - set(self.context))
        known = {key: value for key, value in context.items() if key in accepted}
        return maker(**check_arguments(f"{self.kind} {name!r}", maker, {**given, **known}))

    def chosen(self, value: Any) -> Any:
        """``value``, or what it stands for in a file: a registered name, or a table with one."""
        if isinstance(value, str):
            return self.build(value, {})
        if isinstance(value, dict) and "name" in value:
            return self.build(value["name"], {key: given for key, given in value.items() if key != "name"})
        return value

    def describe(self, name: str) -> dict[str, Any]:
        """Name, one-line summary, parameters (each required or with its default) and notes."""
        maker = self[name]
        options = [
            {"name": key, "type": _type_name(parameter), "required": True}
            if parameter.default is inspect.Parameter.empty
            else {"name": key, "type": _type_name(parameter), "required": False, "default": parameter.default}
            for key, parameter in parameters(maker).items()
            if key not in self.context
        ]
        return {"name": name, "summary": _summary(maker), "parameters": options, **self._notes[name]}


def _summary(maker: Callable[..., Any]) -> str:
    return inspect.cleandoc(maker.__doc__ or "").split("\n", 1)[0]


def _type_name(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
