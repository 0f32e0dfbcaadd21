"""Figures of a model's outputs that the user brings: functions, and objects of torchmetrics."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import tree_map

Score = Callable[..., Any]
"""``score(outputs, targets)``: a number for each sample, [B], or their mean, []; or a torchmetrics object."""


class Accumulator(Protocol):
    """A score of one model, a batch at a time."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Takes in a batch."""

    def compute(self) -> Any:
        """The score of all batches so far."""


class Mean:
    """The mean over all samples of what ``function`` gives for batches."""

    def __init__(self, name: str, function: Score) -> None:
        self.name, self.function = name, function
        self.total, self.samples = torch.zeros((), dtype=torch.float64), 0

    def update(self, outputs: Any, targets: Any) -> None:
        try:
            size, value = len(targets), torch.as_tensor(self.function(outputs, targets))
        except Exception as error:  # the user's own code
            raise HoldfastError(
                f"metric {self.name!r} fails: {type(error).__name__}: {error}; it is given outputs and "
                "targets"
            ) from error
        if value.shape not in ((), (size,)):
            raise HoldfastError(
                f"metric {self.name!r}: expected one number for each of {size} samples, or their mean, got "
                f"shape {list(value.shape)}"
            )
        value = value.double()
        self.total = self.total + (value.sum() if value.ndim else value * size)
        self.samples += size

    def compute(self) -> Any:
        return self.total / self.samples


def accumulator(name: str, score: Score, device: torch.device) -> Accumulator:
    """``score`` with nothing taken in yet."""
    # Whoever has such an object has imported the library.
    library = sys.modules.get("torchmetrics")
    if library is None or not isinstance(score, library.Metric):
        return Mean(name, score)
    fresh: Any = score.clone().to(device)
    fresh.reset()
    own: Accumulator = fresh
    return own


def scored(
    scores: Mapping[str, Score], rows: Tensor, batches: Iterator[tuple[Any, Any]]
) -> dict[str, Tensor]:
    """Every score of every row, [m]; ``batches``: outputs [m, B, ...] of all rows, and targets [B, ...]."""
    started = [{name: accumulator(name, score, rows.device) for name, score in scores.items()} for _ in rows]
    for outputs, targets in batches:
        for row, own in enumerate(started):
            for taking in own.values():
                taking.update(tree_map(lambda part, row=row: part[row], outputs), targets)
    return {name: torch.stack([_number(name, own[name].compute()) for own in started]) for name in scores}


def _number(name: str, value: Any) -> Tensor:
    figure = torch.as_tensor(value)
    if figure.numel() != 1:
        raise HoldfastError(
            f"metric {name!r}: expected one number, got shape {list(figure.shape)}; average them"
        )
    return figure.detach().double().reshape(())
