"""How many local steps nodes take between exchanges: all as many, or each its own number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field
from torch import Tensor

from holdfast.core.validation import Count

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
