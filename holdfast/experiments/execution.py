"""One job from its first round to its end, watched by callbacks: what ``hf.train`` and the runner share."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.simulation import Look, Simulation
from holdfast.experiments.callbacks import Callback, JobInfo, Measurements, Stop
from holdfast.experiments.growth import unbounded
from holdfast.experiments.metrics import Evaluation, costs
from holdfast.experiments.option_forms import Cadence
from holdfast.experiments.record_files import Outcome
from holdfast.problem.problem import on_threads, step_threads

# --- figures and times of a GPU that are read later, so that nobody waits for them ----------------------


class PendingFigures:
    """What was measured after ``round``. On a GPU it is on its way to the host until somebody asks for it."""

    def __init__(
        self, round: int, figures: Tensor, costs: dict[str, float], seconds: Callable[[], float]
    ) -> None:
        self.round, self.costs, self.seconds = round, costs, seconds
        self._figures, self._arrived = figures, None
        if figures.is_cuda:
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._arrived = torch.cuda.Event()
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
            if torch.cuda.is_initialized():
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
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# --- one job from its first round to its end, watched by callbacks --------------------------------------


@dataclass
class Execution:
    """A simulation under way, with what it has recorded."""

    simulation: Simulation
    rounds: int
    evaluate_every: Cadence  # rounds; also measured are the initial models, and those of the last round
    evaluation: Evaluation
    seconds: float = 0.0  # spent in rounds, without measuring
    rows: list[Measurements] = field(default_factory=list)  # of a resumed job, those recorded before too
    diverged: bool = False  # a figure is infinite or NaN

    def __post_init__(self) -> None:
        given = self.evaluate_every
        self.every = self.evaluation.auto_every(self.simulation) if given == "auto" else given
        self.threads = step_threads(self.simulation.problem)
        self._look: Look = lambda: self.evaluation.figures(self.simulation)
        self._unread: PendingFigures | None = None  # what was measured last, while nobody has looked at it

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
            left = self.rounds - self.simulation.round
            with on_threads(self.threads):
                how = self.simulation.prepare(left)
            if self.threads < (cores := torch.get_num_threads()):
                how += f", on {self.threads} of {cores} cores, as a step is small"
            tell("on_prepared", how)
            if self.evaluation.repeatable:
                times = left // self.every
                self._look = self.simulation.executor.repeated(self.simulation, self._look, times)
            # On a GPU, to read a figure is to wait for it. If nobody minds, it is read a round later.
            on_gpu = self.simulation.nodes.is_cuda and self.simulation.world.size == 1
            late = on_gpu and all(callback.late for callback in callbacks)
            outcome = self._rounds_left(tell, stops, asked_to_stop, late)
        except KeyboardInterrupt:
            tell("on_train_end", Outcome("interrupted"))
            raise
        except Exception as error:  # of a user's code, or a mistake of ours
            tell("on_train_end", Outcome("failed", " ".join(f"{type(error).__name__}: {error}".split())))
            raise
        tell("on_train_end", outcome)
        return outcome

    def _rounds_left(
        self, tell: Callable[..., None], stops: list[Stop], asked_to_stop: Callable[[], bool], late: bool
    ) -> Outcome:
        simulation, watch = self.simulation, Stopwatch(self.seconds, by_device=late)
        begins = simulation.round == 0  # with the figures of the initial models
        if not begins and simulation.world.any(bool(stops)):  # by what was recorded before
            return Outcome("stopped", str(stops[0]) if stops else "")
        while begins or simulation.round < self.rounds:
            try:
                rows = self._next(watch, begins, late)
            except HoldfastError as error:
                return Outcome("failed", str(error), error)
            begins = False
            for row in rows:
                tell("on_evaluate", row)
            tell("on_round", simulation.round)
            # All ranks of a cluster have to agree. In the last round there is nothing left to stop.
            unfinished = simulation.round < self.rounds and not self.diverged
            if unfinished and simulation.ledger is not None and simulation.ledger.exhausted(simulation.round):
                stops.append(Stop(simulation.ledger.farewell))
            ends = unfinished and simulation.world.any(bool(stops) or asked_to_stop())
            stopped = ends and simulation.world.any(bool(stops))
            for row in self._last_rows(watch, stopped) if ends else []:
                tell("on_evaluate", row)
            if self.diverged:
                return Outcome("diverged", f"a figure became infinite or NaN by {self._place}")
            if ends:
                return (
                    Outcome("stopped", str(stops[0]) if stops else "") if stopped else Outcome("interrupted")
                )
        # A rank of a resumed run has no rows from before: the first one decides.
        if grown := simulation.world.text_of_leader(lambda: unbounded(self.rows) or ""):
            return Outcome("diverged", f"{grown}: {self._remedy}")
        return Outcome("done")

    @property
    def _place(self) -> str:
        """The round in which it ended because of figures that are not finite, and what to do about them."""
        if not self.simulation.round:
            return "round 0: the initial model's are not finite: look at its weights and inputs"
        return f"round {self.simulation.round}: {self._remedy}"

    @property
    def _remedy(self) -> str:
        """What to do about figures that grow."""
        exact = self.simulation.rounds.channel.transparent
        return "try a smaller lr" if exact else "try a smaller lr, or a channel that loses less"

    def _next(self, watch: Stopwatch, begins: bool, late: bool) -> list[Measurements]:
        """Runs a round, unless the run only ``begins``, and measures it if that is due.

        Returns the rows that are known by now: its own, or, if rows may come ``late``, the one before.
        """
        if not begins:
            with watch.round(), on_threads(self.threads):
                self.simulation.step()
            self.seconds = watch.seconds
        known, done = self._read(), self.simulation.round
        if not self.skips(done):
            self._measure(watch)
            known += [] if late and done < self.rounds else self._read()
        return known

    def skips(self, round: int) -> bool:
        """Whether the models of this round are not measured."""
        return round % self.every != 0 and round != self.rounds

    def _last_rows(self, watch: Stopwatch, stopped: bool) -> list[Measurements]:
        """The rows that nobody was told of yet, when a job ends early.

        The last models of a ``stopped`` job are measured. An interrupted one goes on later, and must
        then have the same rows as if it had not been.
        """
        known = self._read()
        if stopped and self.rows[-1]["round"] < self.simulation.round:
            self._measure(watch)
            known += self._read()
        return known

    def _measure(self, watch: Stopwatch) -> None:
        seconds = watch.total()
        self.simulation.raise_pending(wait=True)
        self._unread = PendingFigures(self.simulation.round, self._look(), costs(self.simulation), seconds)

    def _read(self) -> list[Measurements]:
        """The row that was measured last, unless it has been read already."""
        if self._unread is None:
            return []
        pending, self._unread = self._unread, None
        figures, self.seconds = pending.figures(), pending.seconds()
        named = self.evaluation.row(figures)
        row: Measurements = {"round": pending.round, **named, **pending.costs, "seconds": self.seconds}
        self.rows.append(row)
        self.diverged = self.simulation.world.any(self.evaluation.diverged(figures))
        return [row]


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
