"""Figures and times of a GPU that are read later, so that nobody waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Reading:
    """What was measured after ``round``. On a GPU it is on its way to the host until somebody asks for it."""

    def __init__(
        self, round: int, figures: Tensor, costs: dict[str, float], seconds: Callable[[], float]
    ) -> None:
        self.round, self.costs, self.seconds = round, costs, seconds
        self._figures, self._arrived = figures, None
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def figures(self) -> list[float]:
        """Waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        figures: list[float] = self._figures.tolist()
        return figures


class Stopwatch:
    """The time spent in rounds, without measuring; it begins at ``seconds``.

    ``by_device``: rounds are only queued, and the GPU notes when it begins and ends them. Otherwise the time
    is that of the host, which waits for the GPU before it looks at the clock.
    """

    def __init__(self, seconds: float, by_device: bool) -> None:
        self.seconds, self.by_device = seconds, by_device
        self._began: torch.cuda.Event | None = None  # the first round since the last measurement

    @contextmanager
    def round(self) -> Iterator[None]:
        """Times one round."""
        start = time.perf_counter()
        if self.by_device and self._began is None:
            self._began = _now()
        yield
        if not self.by_device:
            self.seconds += time.perf_counter() - start

    def total(self) -> Callable[[], float]:
        """The seconds until now, to be read when the figures are."""
        if not self.by_device:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                start = time.perf_counter()
                torch.cuda.synchronize()
                self.seconds += time.perf_counter() - start
            total = self.seconds
            return lambda: total
        (began, self._began), ended = (self._began, None), _now()

        def read() -> float:
            self.seconds += 0.0 if began is None else began.elapsed_time(ended) / 1000
            return self.seconds

        return read


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
