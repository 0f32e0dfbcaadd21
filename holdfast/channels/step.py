"""The step with which error feedback between neighbours, or behind an averaging server, is put to use.

Methods differ in how often what mixing does comes back to it. Most are pulled by their own gradients to where
they should be, and mixing acts once: a small step makes it slow. Exact Diffusion, EXTRA, NIDS, LED and
D-Scaffnew add up in a dual, or in the difference of two models, what mixing changed, so without curvature
model and dual are a double integrator, a swing that only mixing itself damps. There a copy that lags behind
its message is negative damping, and a *small* step does not help: the swing gets slower, and the lag stays.
Such a method receives ``lead`` times what the copies have just changed as well, which makes up for the lag.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from holdfast.channels.compressor import Compressor
from holdfast.channels.trials import averaging, mixing, mixing_twice
from holdfast.contract.channel import Channel, Message, Mixing, Wire
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves

TRIALS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.22, 0.16, 0.12, 0.08, 0.06, 0.04, 0.03, 0.02)
LEADS = (0.0, 8.0, 32.0, 128.0)
MARGIN = 0.9
CALM = 0.01  # of a trial's energy is left where a step is stable, with room for what curvature adds
TRIAL_NUMBERS = 2**13  # of all nodes' vectors in a trial
LARGEST_TRIAL = 2**22


class Step(NamedTuple):
    """What becomes of the difference D between the neighbours' copies and one's own.

    The method sees its message plus gamma (D + lead dD) / (1 + lead), with dD the change of D in this round.
    """

    gamma: float
    lead: float = 0.0


def safe_step(delta: float, norm: float, twice: float = 0.0) -> Step:
    """A little below the largest gamma for which mixing is stable with every C of quality ``delta``.

    ``norm`` is the largest eigenvalue mu of L = I - W. What ``CommonMean`` owes obeys the equation of
    neighbours with mu = 1. ``twice``: ``Mixing.twice``.

    Let e = m - h be what C has left out of the message m, and g = gamma mu. Where mixing acts once, m = x and
    x' = x - gamma L (x - e), so the next C is given x' - h, which is e times
    1 + (z - 1) g / (z - 1 + g) as a transfer function. Its gain is largest at z = -1: (2 + g) / (2 - g). C
    leaves at most sqrt(1 - delta) of its input. By the small-gain theorem the loop is stable if the product
    of the two is below 1.

    Where it acts twice, m = 2 x - x_before (without curvature, the worst case), and g is ``twice`` times as
    large. With P = (1 + lead - lead / z) g / (1 + lead), C is given e times
    1 + (z - 1) (2 - 1/z) P / (z - (2 - 1/z) (1 - P)). With the lead below, whose time is that of the lag
    times 1.5, its gain is largest at z = -1 again, (4 + 3 q) / (4 - 3 q) with
    q = (1 + 2 lead) g / (1 + lead); without a lead, small frequencies would be amplified for every g once
    C leaves more than half, sqrt(1 - delta) > 1/2.
    """
    lost = math.sqrt(1 - delta)
    most = MARGIN * (1 - lost) / (1 + lost)
    if twice == 0:
        return Step(min(1.0, 2 * most / norm))
    lead = max(0.0, 1.5 * lost / (1 - lost) - 1)
    return Step(min(1.0, 4 / 3 * most * (1 + lead) / (1 + 2 * lead) / (twice * norm)), lead)


@dataclass(frozen=True)
class Form(Channel):
    """A compressor with a memory; ``feedback.py`` has the three forms."""

    compressor: Compressor
    mixing: Mixing
    fixed: Step | None = None  # the step of a trial

    def __post_init__(self) -> None:
        """Checks nothing: both were checked by those who made them."""

    @property
    def chosen(self) -> Channel:
        return self.compressor

    def decode(self, wire: Wire, like: Message) -> Message:
        return self.compressor.decode(wire, like)

    def step(self, d: int) -> Step:
        """The step for vectors of ``d`` numbers."""
        return self.fixed or find_step(self, d)

    def find_steps(self, message: Message) -> None:
        """Those for ``message``, found here if they need trials, before rounds are traced."""
        for tensor in leaves(message):
            self.step(tensor.shape[-1])


def find_step(form: Form, d: int) -> Step:
    """The step that ``form.compressor.gamma`` asks for, with vectors of ``d`` numbers."""
    gamma = form.compressor.gamma
    if gamma == "safe":
        return _safe(form, d)
    return tuned_step(form, d) if gamma == "tuned" else given_step(form, d, gamma)


@lru_cache(maxsize=64)
def tuned_step(form: Form, d: int) -> Step:
    """The step after which random vectors of about ``d`` numbers have come nearest to what they should be.

    Deterministic, on a CPU, so that all nodes find the same.
    """
    safe = _safe(form, d)
    if d < 3:
        return safe
    # Where mixing acts twice, trials are longer and there are more, and half of the best is taken.
    leads, trials, patience = (LEADS, TRIALS[::2], 1) if form.mixing.twice else (LEADS[:1], TRIALS, 2)
    best, least = safe, _left(form, d, safe)
    for lead in leads:
        nearest, worse = math.inf, 0
        for gamma in (trial for trial in trials if trial > safe.gamma):
            left = _left(form, d, Step(gamma, lead))
            if left < nearest:
                nearest, worse = left, 0
                if left < least:
                    best, least = Step(gamma, lead), left
            elif nearest < math.inf and (worse := worse + 1) == patience:
                break
    if best == safe:
        return safe
    # Methods differ more from the trial where mixing acts twice, as curvature adds to the lag, and behind a
    # server: FedLin diverged with the full step, and APDA-Inexact with half of it.
    part = 3 if form.mixing.weights is None else 2 if form.mixing.twice else 1
    return best._replace(gamma=max(safe.gamma, best.gamma / part))


@lru_cache(maxsize=64)
def given_step(form: Form, d: int, gamma: float) -> Step:
    """``gamma`` with the least lead that suits it; where mixing acts twice it is refused if none does.

    A lead damps the swing and slows down all the rest, so no more of it is taken than stability needs.
    """
    if not form.mixing.twice:
        return Step(gamma)
    safe = _safe(form, d)
    if gamma <= safe.gamma or d < 3:
        return safe._replace(gamma=gamma)
    left = {lead: _left(form, d, Step(gamma, lead)) for lead in LEADS}
    best = next((lead for lead in LEADS if left[lead] < CALM), min(LEADS, key=left.__getitem__))
    if left[best] < 1:
        return Step(gamma, best)
    tuned, name = tuned_step(form, d), type(form.compressor).__name__
    raise HoldfastError(
        f"{name}.gamma: {gamma:g} is too large for a method that adds up what mixing changes, such as LED or "
        f'Exact Diffusion: it would diverge. Give "tuned", which is {tuned.gamma:.2g} here, or "safe", which '
        f"is {safe.gamma:.2g}, or let more through"
    )


def _safe(form: Form, d: int) -> Step:
    return safe_step(form.compressor.delta(d), form.mixing.norm, form.mixing.twice)


def _left(form: Form, d: int, step: Step) -> float:
    """What a trial with ``step`` leaves; inf if it diverges."""
    nodes = form.mixing.nodes
    size = form.compressor.trial_size(d, max(64, TRIAL_NUMBERS // nodes))
    if nodes * size > LARGEST_TRIAL:
        raise HoldfastError(
            f"{type(form.compressor).__name__}.gamma: {nodes} vectors of {size} numbers are too many to find "
            'a step by trial; give "safe", or a number'
        )
    trial, by = replace(form, fixed=step), form.mixing
    if by.weights is None:
        return averaging(trial, by, size)
    return mixing_twice(trial, by, step.gamma, size) if by.twice else mixing(trial, by, size)
