"""One job from its first round to its end, watched by callbacks: what ``hf.train`` and the runner share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.engines.common.driver import Run
from holdfast.experiments.callbacks import Callback, Stop, Watched
from holdfast.experiments.statuses import Outcome


def execute(
    run: Run, job: Watched, callbacks: Sequence[Callback], asked_to_stop: Callable[[], bool]
) -> Outcome:
    """Runs what is left of ``run``; ``asked_to_stop`` is looked at after every round.

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

    simulation = run.simulation
    try:
        tell("job_started", simulation)
        tell("job_prepared", simulation.prepare(run.rounds - simulation.round))
        outcome = _all_rounds(run, tell, stops, asked_to_stop)
    except KeyboardInterrupt:
        tell("job_ended", Outcome("interrupted"))
        raise
    except Exception as error:  # of a user's code, or a mistake of ours
        tell("job_ended", Outcome("failed", " ".join(f"{type(error).__name__}: {error}".split())))
        raise
    tell("job_ended", outcome)
    return outcome


def _all_rounds(
    run: Run, tell: Callable[..., None], stops: list[Stop], asked_to_stop: Callable[[], bool]
) -> Outcome:
    simulation, rounds = run.simulation, iter(run)
    while True:
        try:
            row = next(rounds)
        except StopIteration:
            return Outcome("done")
        except HoldfastError as error:
            return Outcome("failed", str(error), error)
        if row is not None:
            tell("row_recorded", row)
        tell("round_done", simulation.round)
        if run.diverged:
            reached = simulation.round
            return Outcome(
                "diverged", f"a figure became infinite or NaN by round {reached}: try a smaller lr"
            )
        # All ranks of a cluster have to agree. In the last round there is nothing left to stop.
        if simulation.round < run.rounds and simulation.world.any(bool(stops) or asked_to_stop()):
            if simulation.world.any(bool(stops)):
                return Outcome("stopped", str(stops[0]) if stops else "")
            return Outcome("interrupted")


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
