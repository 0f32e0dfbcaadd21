"""One job from its first round to its end, watched by callbacks: what ``hf.train`` and the runner share."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from holdfast.core.errors import HoldfastError
from holdfast.core.tree import all_finite
from holdfast.engines.common.simulation import Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Row, Stop
from holdfast.experiments.statuses import Outcome


@dataclass
class Run:
    """A simulation under way, with what it has recorded."""

    simulation: Simulation
    rounds: int
    evaluate_every: int  # rounds; also measured are the initial models, and those of the last round
    measure: Callable[[Simulation], Row]
    seconds: float = 0.0  # spent in rounds, without measuring
    rows: list[Row] = field(default_factory=list)  # of a resumed job, those recorded before too
    diverged: bool = False

    def execute(
        self,
        job: JobInfo,
        callbacks: Sequence[Callback] = (),
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Runs the rounds that are left; ``asked_to_stop`` is looked at after each.

        A ``HoldfastError`` in a round is the outcome "failed"; any other exception is raised, and so is
        everything but ``Stop`` that a callback raises. In either case callbacks are told how the job ended.
        """
        stops: list[Stop] = []

        def tell(event: str, *told: Any) -> None:
            for callback in callbacks:
                try:
                    getattr(callback, event)(job, *told)
                except Stop as stop:
                    stops.append(stop)

        try:
            tell("on_train_begin", self.simulation)
            if self.rows:
                tell("on_resume", list(self.rows))
            tell("on_prepared", self.simulation.prepare(self.rounds - self.simulation.round))
            outcome = self._rounds_left(tell, stops, asked_to_stop)
        except KeyboardInterrupt:
            tell("on_train_end", Outcome("interrupted"))
            raise
        except Exception as error:  # of a user's code, or a mistake of ours
            tell("on_train_end", Outcome("failed", " ".join(f"{type(error).__name__}: {error}".split())))
            raise
        tell("on_train_end", outcome)
        return outcome

    def _rounds_left(
        self, tell: Callable[..., None], stops: list[Stop], asked_to_stop: Callable[[], bool]
    ) -> Outcome:
        simulation = self.simulation
        begins = simulation.round == 0  # with the figures of the initial models
        while begins or simulation.round < self.rounds:
            try:
                row = self._record() if begins else self._step()
            except HoldfastError as error:
                return Outcome("failed", str(error), error)
            begins = False
            if row is not None:
                tell("on_evaluate", row)
            tell("on_round", simulation.round)
            if self.diverged:
                why = f"a figure became infinite or NaN by round {simulation.round}: try a smaller lr"
                return Outcome("diverged", why)
            # All ranks of a cluster have to agree. In the last round there is nothing left to stop.
            if simulation.round < self.rounds and simulation.world.any(bool(stops) or asked_to_stop()):
                if simulation.world.any(bool(stops)):
                    return Outcome("stopped", str(stops[0]) if stops else "")
                return Outcome("interrupted")
        return Outcome("done")

    def _step(self) -> Row | None:
        """Runs a round; the row that it recorded, if it was due."""
        start = time.perf_counter()
        self.simulation.step()
        done = self.simulation.round
        due = done % self.evaluate_every == 0 or done == self.rounds
        if due and self.simulation.problem.x0.is_cuda:
            torch.cuda.synchronize()  # rounds are only queued; their time ends when they do
        self.seconds += time.perf_counter() - start
        return self._record() if due else None

    def _record(self) -> Row:
        self.simulation.settle(wait=True)
        row: Row = {"round": self.simulation.round, **self.measure(self.simulation), "seconds": self.seconds}
        self.rows.append(row)
        # Accuracies stay finite whatever the models, so these are looked at as well.
        finite = all(math.isfinite(value) for value in row.values())
        diverged = not (finite and all_finite(self.simulation.models))
        self.diverged = self.simulation.world.any(diverged)
        return row


@contextmanager
def stop_signals(*numbers: signal.Signals, hurry: bool = True) -> Iterator[Callable[[], bool]]:
    """Whether one of the signals has come, instead of what it does otherwise.

    To ``hurry``, a second Ctrl-C stops at once. Ranks may hear of one Ctrl-C twice, from the terminal and
    from torchrun. Only the main thread of a process can watch for signals; in others none comes.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if hurry and asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    watched = numbers if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, ask) for number in watched}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
