"""Parts of a model that a method treats apart: its last numbers, or parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import torch
from pydantic import BeforeValidator, InstanceOf
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.validation import quoted


class ModelPart(Protocol):
    """Some columns of models or gradients [..., d]; the others are the rest."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def least_dim(self) -> int:
        """The smallest d of a model that has this part, and a rest."""

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The rest [..., d - size] and the part [..., size]."""

    def join(self, rest: Tensor, part: Tensor) -> Tensor:
        """What ``split`` has taken apart."""


@dataclass(frozen=True, repr=False)
class Last:
    """The last ``size`` columns."""

    size: int

    def __repr__(self) -> str:
        return str(self.size)

    @property
    def least_dim(self) -> int:
        return self.size + 1

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : -self.size], x[..., -self.size :]

    def join(self, rest: Tensor, part: Tensor) -> Tensor:
        return torch.cat([rest, part], -1)


@dataclass(frozen=True)
class Columns:
    """The columns from a to b of every pair (a, b) in ``ranges``, which are ascending and apart."""

    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return sum(b - a for a, b in self.ranges)

    @property
    def least_dim(self) -> int:
        return max(self.ranges[-1][1], self.size + 1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pieces = torch.split(x, self._lengths(x.shape[-1]), -1)  # the rest and the part take turns
        return torch.cat(pieces[::2], -1), torch.cat(pieces[1::2], -1)

    def join(self, rest: Tensor, part: Tensor) -> Tensor:
        lengths = self._lengths(rest.shape[-1] + part.shape[-1])
        pieces = [torch.split(rest, lengths[::2], -1), (*torch.split(part, lengths[1::2], -1), part[..., :0])]
        return torch.cat([piece for turn in zip(*pieces, strict=True) for piece in turn], -1)

    def _lengths(self, dim: int) -> list[int]:
        bounds = [0, *chain.from_iterable(self.ranges), dim]
        return [b - a for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class NamedPart:
    """Parameters by the names of modules or parameters, such as "fc", or patterns, such as "*.norm*"."""

    names: tuple[str, ...]

    def among(self, sizes: Mapping[str, int]) -> Columns:
        """The columns of these parameters; ``sizes``: how many numbers each parameter has, in order."""
        ranges: list[tuple[int, int]] = []
        end, met = 0, set()
        for name, size in sizes.items():
            start, end = end, end + size
            if not (by := [given for given in self.names if _fits(given, name)]):
                continue
            met.update(by)
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            ranges.append((start, end))
        for given in self.names:
            if given not in met:
                raise unknown("parameter or module of the model", given, sizes)
        found = Columns(tuple(ranges))
        if found.size == end:
            raise HoldfastError(f"{', '.join(self.names)}: these are all parameters, and nothing is left")
        return found


def _fits(given: str, parameter: str) -> bool:
    return parameter == given or parameter.startswith(f"{given}.") or fnmatchcase(parameter, given)


def _chosen(value: Any) -> Any:
    """What ``value`` stands for in a call or a file."""
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
        return NamedPart(tuple(names))
    if isinstance(value, Last | Columns | NamedPart):
        return value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            "should be how many of the model's last numbers, at least 1, or the names of modules or "
            f"parameters, got {quoted(value)}"
        )
    return Last(value)


if TYPE_CHECKING:
    Part = ModelPart | NamedPart | int | str | list[str]
else:
    Part = Annotated[InstanceOf[Last] | InstanceOf[Columns] | InstanceOf[NamedPart], BeforeValidator(_chosen)]


def found_part(part: Part) -> ModelPart:
    """``part`` of a method, if it is known which columns it is."""
    if isinstance(part, Last | Columns):
        return part
    assert isinstance(part, NamedPart)
    raise HoldfastError(
        f"{', '.join(part.names)}: parts by name are found where the model is known, as in hf.train; "
        "elsewhere call method.for_model first"
    )
