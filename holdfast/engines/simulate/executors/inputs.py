"""The numbers of a method that a replayed program takes as inputs.

A program is prepared once, with a method as it is in one round. Whatever ``method.at(round)`` changes in a
later round must reach the program from outside, so these numbers are replaced by tensors that are filled
before each replay. Which ones change is found by comparing what ``at`` returns for the planned rounds.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from holdfast.contract import Method
from holdfast.contract.schedules import Rate
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import hints

Path = tuple[Hashable, ...]  # names of fields, keys and positions that lead to a value

_ABSENT = object()


class NotReplayableError(Exception):
    """Rounds cannot be prepared once and replayed. They run step by step instead, with the same numbers."""


class ChangingFieldError(NotReplayableError):
    """A field of the method changes in a way that a replayed program cannot follow."""


class MethodInputs:
    """``method`` for a program that replays ``rounds`` rounds from ``first`` on.

    Inputs are the numbers that change in these rounds, the rates that stay the same, so that what was
    compiled for one step size serves for all, and all tensors: a graph cannot copy them from the host.
    """

    def __init__(self, method: Method, first: int, rounds: int, device: torch.device) -> None:
        self._given = method
        self._now = method.at(first)
        self._parts = dict(_parts(self._now))
        changing = self._changing(range(first + 1, first + rounds))
        self.changing = [self._name(path) for path in self._parts if path in changing]
        rates = {(name,) for name, kind in hints(type(self._now)).items() if kind == Rate}
        self._buffers = {
            path: _buffer(value, device)
            for path, value in self._parts.items()
            if path in changing or (path in rates and _is_number(value)) or _is_tensor(value)
        }
        self.method: Method = _with(self._now, self._buffers)
        """The method with a tensor in place of every input."""

    def fill(self, round: int) -> None:
        """Puts the numbers of ``round`` into the inputs.

        Raises ``ChangingFieldError``, with the name of the field, if anything else differs from what the
        program was prepared for.
        """
        now = self._given.at(round)
        parts = self._parts if now is self._now else dict(_parts(now))
        for path in self._differing(parts):
            self._check_is_input(path, parts)
            if path not in self._buffers:
                raise ChangingFieldError(f"{self._name(path)} has a value that no planned round has")
        for path, buffer in self._buffers.items():
            value = parts[path]
            if isinstance(value, Tensor):
                buffer.copy_(value)
            else:
                buffer.fill_(value)

    def _changing(self, rounds: range) -> set[Path]:
        changing: set[Path] = set()
        for round in rounds:
            try:
                now = self._given.at(round)
            except HoldfastError:  # the run will stop there and say why; no later round is replayed
                break
            if now is not self._now:
                parts = dict(_parts(now))
                for path in self._differing(parts):
                    self._check_is_input(path, parts)
                    changing.add(path)
        return changing

    def _differing(self, parts: dict[Path, Any]) -> Iterator[Path]:
        if parts is self._parts:
            return
        for path in {**self._parts, **parts}:
            if not _same(self._parts.get(path, _ABSENT), parts.get(path, _ABSENT)):
                yield path

    def _check_is_input(self, path: Path, parts: dict[Path, Any]) -> None:
        """Refuses a value that changes and is neither a number nor a tensor of one shape and type."""
        before, after = self._parts.get(path, _ABSENT), parts.get(path, _ABSENT)
        numbers = _is_number(before) and _is_number(after)
        if not numbers and not (_is_tensor(before) and _is_tensor(after) and _form(before) == _form(after)):
            raise ChangingFieldError(f"{self._name(path)} changes from round to round and is not a number")

    def _name(self, path: Path) -> str:
        return ".".join([type(self._given).__name__, *map(str, path)])


def _children(value: Any) -> dict[Hashable, Any] | None:
    """What ``value`` consists of, by name; None if it is taken as a whole."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {**fields, **getattr(value, "__dict__", {})}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return None


def _parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything inside ``value`` that is taken as a whole, and the type of everything that is not."""
    children = _children(value)
    yield path, value if children is None else type(value)
    for name, child in (children or {}).items():
        yield from _parts(child, (*path, name))


def _with(value: Any, buffers: dict[Path, Tensor], path: Path = ()) -> Any:
    """``value`` with the ``buffers`` put in their places; what has none inside stays the same object."""
    if path in buffers:
        return buffers[path]
    if not any(place[: len(path)] == path for place in buffers):
        return value
    new = {name: _with(child, buffers, (*path, name)) for name, child in (_children(value) or {}).items()}
    if isinstance(value, dict):
        return new
    if isinstance(value, list | tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
    changed = copy.copy(value)
    for name, child in new.items():
        object.__setattr__(changed, str(name), child)
    return changed


def _buffer(value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    # Numbers of Python are double precision, whole ones too where a method divides by them.
    return torch.tensor(float(value), device=device, dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return _form(a) == _form(b) and torch.equal(a, b)
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # such as arrays, whose comparison is an array
        return False
