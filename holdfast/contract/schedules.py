"""Hyperparameters that change from round to round: a number, or a function of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from holdfast.core.registry import Registry
from holdfast.core.validation import Count, NonNegative, Positive

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
