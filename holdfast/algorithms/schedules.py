"""Hyperparameters that change from round to round: a number, or a function of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from holdfast.registry import Registry
from holdfast.validation import Count, NonNegative, Positive

Schedule = Callable[[int], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")


@SCHEDULES.register("constant")
def constant(value: Positive) -> Rate:
    """The same value in every round."""
    return _named(f"constant({value})", lambda round: value)


@SCHEDULES.register("halving")
def halving(start: Positive, every: Count) -> Rate:
    """Starts at ``start`` and is halved every ``every`` rounds."""
    return _named(f"halving({start}, every={every})", lambda round: start * 0.5 ** (round // every))


@SCHEDULES.register("cosine")
def cosine(start: Positive, rounds: Count, end: NonNegative = 0.0) -> Rate:
    """Falls from ``start`` towards ``end`` along half a cosine over ``rounds`` rounds, then stays."""

    def value(round: int) -> float:
        # The last round still takes a positive step: the curve would reach `end` one round later.
        progress = min(round, rounds - 1) / rounds
        return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2

    return _named(f"cosine({start}, rounds={rounds}, end={end})", value)


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that prints as it was written."""

    text: str
    function: Schedule

    def __call__(self, round: int) -> float:
        return self.function(round)

    def __repr__(self) -> str:
        return self.text


def _named(text: str, function: Schedule) -> Rate:
    return NamedSchedule(text, function)  # type: ignore[return-value]


def _from_config(value: Any) -> Any:
    """``{schedule = "halving", start = 0.1, every = 100}`` as it stands in an experiment file."""
    if isinstance(value, dict) and "schedule" in value:
        options = dict(value)
        return SCHEDULES.build(options.pop("schedule"), options)
    return value


if TYPE_CHECKING:
    # Engines evaluate schedules before each round (`Algorithm.at`), so methods compute with plain numbers.
    Rate = float
else:
    Rate = Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Schedule, BeforeValidator(_from_config)
    ]
