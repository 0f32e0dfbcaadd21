"""When a run whose figures are all finite has diverged nevertheless: they grew, and go on growing.

Divergence is exponential: from half of the rounds to their end, a figure grows as much as in all rounds
before. What a healthy run does is not: noise levels off, and models that drift apart unhindered do so like a
power of the rounds, which doubling these multiplies by a small number. Both size and growth are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.experiments.callbacks import Measurements
from holdfast.experiments.metrics import METRICS

LOSS = "train_loss"
GROWN = 10  # times the initial loss: no ordinary noise
DOUBLED = 2  # from half of the rounds to their end, so large a loss does not level off
HUGE = 1e6  # times the initial figure, or 1
FAST = 100  # from half of the rounds to their end: beyond any power of the rounds up to the sixth
HUGE_AT_ONCE = 1e12  # where too few rounds were measured to tell how fast a figure grew
TELLING = 3  # measurements in the second half of the rounds from which that can be told


def unbounded(rows: Sequence[Measurements]) -> str | None:
    """Which figure of a run that was not cut short grew without bound, in words; None if none did.

    ``rows`` are what was measured, the initial models first. Judged are figures that fall or settle in a run
    that works: the losses, the consensus, distances to an optimum.
    """
    if not rows:
        return None
    start, end = rows[0], rows[-1]
    half = end["round"] / 2
    middle = next(row for row in reversed(rows) if row["round"] <= half)
    late = [row for row in rows if row["round"] > half]
    for name in (name for name, metric in METRICS.items() if metric.falls and name in end):
        base = max(1.0, abs(start.get(name, 0.0)))
        before, last = middle.get(name, 0.0), end[name]
        enough = len(late) >= TELLING
        if last > base * (HUGE if enough else HUGE_AT_ONCE) and last > FAST * abs(before):
            since = middle if enough else start
            return (
                f"the {name} grew from {since.get(name, 0.0):.3g} at round {since['round']:.0f} to {last:.3g}"
            )
        high = name == LOSS and all(row.get(name, 0.0) > GROWN * base for row in late)
        if high and enough and last > DOUBLED * before:
            first = start.get(name, 0.0)
            return f"the {name} grew from {first:.3g} at round 0 to {last:.3g}, and goes on growing"
    return None


def grown_loss(rows: Sequence[Measurements]) -> str | None:
    """In words, that the loss ended far above where it began, whether or not it goes on growing."""
    values = [row[LOSS] for row in rows if LOSS in row]
    if not values or values[-1] <= GROWN * max(1.0, abs(values[0])):
        return None
    return f"the {LOSS} grew from {values[0]:.3g} to {values[-1]:.3g}"
