"""Named things: algorithms, topologies, data sets, models, partitions, losses.

Whatever is registered here can be chosen by name in an experiment file, with its parameters checked, and is
listed by ``holdfast list``.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar, cast

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.validation import check_arguments, parameters, quoted

# --- named things: algorithms, topologies, data sets, models, partitions, losses ------------------------


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


# --- what a class promises of itself --------------------------------------------------------------------


class NotInherited:
    """A class whose ``_promises``, class attributes by name, hold for itself only.

    A subclass may override what they are about. Without a declaration of its own it promises nothing.
    """

    _promises: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls._promises:
            if name not in vars(cls):
                setattr(cls, name, cls._undeclared(getattr(cls, name)))

    @classmethod
    def _undeclared(cls, inherited: Any) -> Any:
        """What a subclass has that does not declare the promise that it would have ``inherited``."""
        return type(inherited)()


# --- importing what a user names as ``module:attribute`` ------------------------------------------------
#
# Only for names in the user's own files: whoever writes the name chooses the code that runs.


def import_named(kind: str, spec: str, example: str) -> Any:
    """What ``spec``, such as ``example``, points to in the current folder or the installed packages."""
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise HoldfastError(f"{kind} {spec!r}: expected module:Class, for example {example}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script does not search the current folder by itself
    try:
        module = import_module(module_name)
    except Exception as error:  # of the user's own module, which runs while it is imported
        raise HoldfastError(
            f"{kind} {spec!r}: cannot import {module_name!r} in the current folder or the installed packages "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"name in module {module_name!r}", attribute, public)
    return getattr(module, attribute)


def make_own(kind: str, spec: str, given: Mapping[str, Any], *bases: type) -> Any:
    """The instance of one of ``bases`` that ``spec`` names, or one of the class it names, with ``given``."""
    found = import_named(kind, spec, f"my_module:My{kind.capitalize()}")
    if inspect.isclass(found) and issubclass(found, bases):
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise HoldfastError(f"{kind} {spec!r}: the class lacks {', '.join(missing)}")
        return found(**check_arguments(f"{kind} {spec!r}", found, given))
    if not isinstance(found, bases):
        names = " or ".join(base.__name__ for base in bases)
        raise HoldfastError(
            f"{kind} {spec!r}: expected a subclass or an instance of {names}, got {quoted(found)}"
        )
    if given:
        raise HoldfastError(f"{kind} {spec!r}: it is made already; leave out {', '.join(given)}")
    return found
