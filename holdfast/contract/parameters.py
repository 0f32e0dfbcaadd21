"""What methods and optimisers are made of: schedules, numbers of local steps, parts of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

import torch
from pydantic import BeforeValidator, Field, InstanceOf
from torch import Tensor

from holdfast.core.errors import HoldfastError, unknown
from holdfast.core.registry import Registry
from holdfast.core.validation import Count, NonNegative, Positive, check, check_fields, hints, quoted

# --- hyperparameters that change from round to round: a number, or a function of the round --------------


Schedule = Callable[[int], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")


@SCHEDULES.register_checked("constant")
def constant(value: Positive) -> Rate:
    """The same value in every round."""
    return _named(f"constant({value})", lambda round: value, extremes=(0,))


@SCHEDULES.register_checked("halving")
def halving(start: Positive, every: Count) -> Rate:
    """Starts at ``start`` and is halved every ``every`` rounds."""
    text = f"halving({start}, every={every})"
    return _named(text, lambda round: start * 0.5 ** (round // every), extremes=(0,))


@SCHEDULES.register_checked("cosine")
def cosine(start: Positive, rounds: Count, end: NonNegative = 0.0) -> Rate:
    """Falls from ``start`` towards ``end`` along half a cosine over ``rounds`` rounds, then stays."""

    def value(round: int) -> float:
        return end + (start - end) * (1 + math.cos(math.pi * _progress(round, rounds))) / 2

    return _named(f"cosine({start}, rounds={rounds}, end={end})", value, extremes=(0, rounds - 1))


@SCHEDULES.register_checked("linear")
def linear(start: NonNegative, rounds: Count, end: NonNegative = 0.0) -> Rate:
    """Goes from ``start`` towards ``end`` along a straight line over ``rounds`` rounds, then stays."""
    return _named(
        f"linear({start}, rounds={rounds}, end={end})",
        lambda round: start + (end - start) * _progress(round, rounds),
        extremes=(0, rounds - 1),
    )


def _progress(round: int, rounds: int) -> float:
    """From 0 up to the last round's, short of 1: `end` would come one round later, as it may be 0."""
    return min(round, rounds - 1) / rounds


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that prints as it was written."""

    text: str
    function: Schedule
    extremes: tuple[int, ...]  # rounds whose values are allowed only if those of all rounds are

    def __call__(self, round: int) -> float:
        return self.function(round)

    def __repr__(self) -> str:
        return self.text


def _named(text: str, function: Schedule, extremes: tuple[int, ...]) -> Rate:
    return NamedSchedule(text, function, extremes)  # type: ignore[return-value]


def _from_config(value: Any) -> Any:
    """``{schedule = "halving", start = 0.1, every = 100}`` as it stands in an experiment file."""
    if isinstance(value, dict) and "schedule" in value:
        options = dict(value)
        return SCHEDULES.build(options.pop("schedule"), options)
    return value


if TYPE_CHECKING:
    # Engines evaluate schedules before each round (`Algorithm.at`), so methods compute with plain numbers.
    Rate = float  # positive
    Weight = float  # 0 or positive
    Chance = float  # a probability, 0 and 1 included
else:
    Rate = Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Schedule, BeforeValidator(_from_config)
    ]
    Weight = Annotated[NonNegative | Schedule, BeforeValidator(_from_config)]
    Chance = Annotated[Annotated[float, Field(ge=0, le=1)] | Schedule, BeforeValidator(_from_config)]


# --- what methods and optimisers are made of ------------------------------------------------------------


@dataclass(frozen=True)
class Hyperparameters:
    """Fields are checked when they are given. A ``Rate``, ``Weight`` or ``Chance`` may be a schedule.

    A field may have hyperparameters of its own, as a method's optimiser does: its schedules count, too.
    """

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)
        for name, value in vars(self).items():
            if isinstance(value, NamedSchedule):
                for round in value.extremes:  # now, and not in the middle of a run
                    where = f"{type(self).__name__}.{name}: {value!r} at round {round}"
                    check(where, hints(type(self))[name], value(round))

    @property
    def may_be_padded(self) -> bool:
        """Whether zeros may follow the columns of a row, as far as fields with hyperparameters know."""
        return all(part.may_be_padded for part in vars(self).values() if isinstance(part, Hyperparameters))

    def at(self, round: int) -> Self:
        """The same with every schedule evaluated at ``round``."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Hyperparameters):
                if (part := value.at(round)) is not value:
                    changed[name] = part
            elif callable(value):
                where = f"{type(self).__name__}.{name} at round {round}"
                changed[name] = check(where, hints(type(self))[name], value(round))
        if not changed:
            return self
        now = object.__new__(type(self))
        now.__dict__.update(vars(self) | changed)
        return now


# --- how many local steps nodes take between exchanges: all as many, or each its own number -------------


Steps = int | Tensor
"""What ``Oracle.steps`` gives: a number, or [..., 1] like the model where the nodes here differ."""


def _per_node(given: Any) -> Any:
    """A list, or ``{nodes = [1, 2, 5]}`` as it stands in an experiment file, where a list is a sweep."""
    if isinstance(given, dict) and set(given) == {"nodes"}:
        given = given["nodes"]
    return tuple(given) if isinstance(given, list) else given


if TYPE_CHECKING:
    LocalSteps = int | tuple[int, ...]
else:
    LocalSteps = Annotated[
        Count | Annotated[tuple[Count, ...], Field(min_length=1)], BeforeValidator(_per_node)
    ]


def most_steps(given: LocalSteps) -> int:
    """What no node takes more of."""
    return max(given) if isinstance(given, tuple) else given


def turns(steps: Steps) -> Iterator[Tensor | None]:
    """Once for each local step: the nodes [..., 1] that still take it; None: all of them."""
    if isinstance(steps, Tensor) and steps.ndim:
        for taken in range(int(steps.max())):
            yield taken < steps
    else:
        for _ in range(steps):
            yield None


# --- parts of a model that a method treats apart: its last numbers, or parameters by name ---------------


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


def least_dim(part: Part) -> int:
    """The smallest d of a model that has ``part`` and a rest; 1 while it is not known which columns it is."""
    return part.least_dim if isinstance(part, Last | Columns) else 1


def found_part(part: Part) -> ModelPart:
    """``part`` of a method, if it is known which columns it is."""
    if isinstance(part, Last | Columns):
        return part
    assert isinstance(part, NamedPart)
    raise HoldfastError(
        f"{', '.join(part.names)}: parts by name are found where the model is known, as in hf.train; "
        "elsewhere call method.for_model first"
    )
