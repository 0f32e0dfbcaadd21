"""What the experiments of the paper share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from holdfast_papers.base import Finding, Line, Panel, judged, judged_by_seeds
from holdfast_papers.evidence import Curve, Evidence, mean_text

# Two cores solve the 784 x 10 parameters of MNIST to 1e-12 only in hours: small images, and L-BFGS to 1e-9.
DIGITS = ("problem.dataset=digits",)
NEARLY_EXACT = '{name="lbfgs",tolerance=1e-9}'
ERROR = "rel_energy"

LINES = [
    Line("DualFL", "dualfl"),
    Line("FedPD", "fedpd"),
    Line("FedDR", "feddr"),
    Line("FedDyn", "feddyn"),
    Line("FedDualAvg", "feddualavg"),
    Line("Scaffnew", "scaffnew"),
    Line("APDA-Inexact", "apda-inexact"),
    Line("5GCS", "5gcs"),
]


def solved_by(solver: str, *algorithms: str) -> list[str]:
    """Overrides that give these algorithms another local solver."""
    return [f"algorithm.{algorithm}.solver={solver}" for algorithm in algorithms]


def error_panel(title: str, lines: Sequence[Line], each: str = "") -> Panel:
    return Panel(title, lines, y=ERROR, y_label="relative energy error", log_y=True, each=each)


def error(curve: Curve, round: int) -> float:
    """Relative energy error after ``round``, median over the seeds."""
    return float(np.median(curve.at(ERROR, round)))


def settings(e: Evidence, algorithm: str) -> list[Curve]:
    """The curves of all settings of a method, but for those that diverged."""
    curves = [curve for preset in e.runs for curve in e.curves(preset)]
    return [curve for curve in curves if curve.algorithm == algorithm and not curve.broke_off]


def best_curve(e: Evidence, algorithm: str, round: int) -> Curve:
    """The curve of the setting that is best at ``round``, among those swept."""
    return min(settings(e, algorithm), key=lambda curve: error(curve, round))


def lowest_error(e: Evidence, algorithm: str, round: int) -> float:
    """The error after ``round`` of the setting that is best at that round, among those swept."""
    return error(best_curve(e, algorithm, round), round) if settings(e, algorithm) else math.inf


def last_round(e: Evidence) -> int:
    """The last round that all methods have."""
    return min(int(curve.rounds[-1]) for name in ("dualfl", *rivals(e)) for curve in settings(e, name))


def rivals(e: Evidence) -> list[str]:
    """The methods other than DualFL."""
    names = dict.fromkeys(curve.algorithm for preset in e.runs for curve in e.curves(preset))
    return [name for name in names if name != "dualfl"]


def below_all_others(e: Evidence, rounds: Sequence[int]) -> Finding:
    """Whether DualFL is at most 5 % above the best rival in each of ``rounds``, all at their best setting."""
    best = {r: min(rivals(e), key=lambda name: lowest_error(e, name, r)) for r in rounds}
    ratios = {r: lowest_error(e, "dualfl", r) / lowest_error(e, best[r], r) for r in rounds}
    ours = ", ".join(f"round {r}: {ratios[r]:.2g} of {best[r]}" for r in rounds)
    needed = "at most 1.05 times the best rival, every method at its best setting for that round"
    return judged(max(ratios.values()) <= 1.05, ours, needed)._replace(sure=seeds_below(e, best, rounds))


def seeds_below(e: Evidence, best: dict[int, str], rounds: Sequence[int]) -> str:
    """In how many seeds of a rival that has several DualFL is below it, at the last of ``rounds``."""
    last = rounds[-1]
    rival = best_curve(e, best[last], last).at(ERROR, last)
    if len(rival) == 1:
        return ""
    below = int((lowest_error(e, "dualfl", last) <= 1.05 * rival).sum())
    return f"{below} of {len(rival)} seeds of {best[last]}"


def factors(curve: Curve, first: int, last: int) -> np.ndarray:
    """By what the error shrinks in a round, from ``first`` to ``last``, [seeds]."""
    return np.asarray((curve.at(ERROR, last) / curve.at(ERROR, first)) ** (1 / (last - first)))


def similar_rates(e: Evidence, others: Sequence[str]) -> Finding:
    """Decades per round in the second half of the run, each method at its best setting for the last round."""
    last = last_round(e)
    rates = {
        name: float(-np.log10(np.median(factors(best_curve(e, name, last), last // 2, last))))
        for name in ("dualfl", *others)
    }
    ours = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
    holds = all(0.5 <= rates["dualfl"] / rates[name] <= 2 for name in others)
    return judged(holds, f"decades per round: {ours}", f"within a factor of 2, rounds {last // 2} to {last}")


def rounds_to(curve: Curve, goal: float) -> float:
    """The first round with an error of at most ``goal``, median over the seeds; inf if there is none."""
    return float(np.median(curve.first("round", ERROR, high=goal)))


def rounds_text(rounds: float) -> str:
    return f"{rounds:.0f}" if math.isfinite(rounds) else "not reached"


def same_rate(e: Evidence, few: int, many: int) -> Finding:
    """Whether the error of many clients shrinks as fast as that of few, after a third of the rounds."""
    curves = [e.curve("dualfl", nodes=nodes) for nodes in (few, many)]
    last = int(curves[0].rounds[-1])
    first = last // 3
    shrinks = [factors(curve, first, last) for curve in curves]
    ours = (
        f"factor per round {mean_text(shrinks[0], 3)} with {few} clients, {mean_text(shrinks[1], 3)} with "
        f"{many}; rounds to 1e-6: {' and '.join(rounds_text(rounds_to(curve, 1e-6)) for curve in curves)}"
    )
    needed = f"at most 0.01 larger, from round {first} to {last}"
    return judged_by_seeds([shrinks[0] + 0.01 - shrinks[1]], ours, needed)


def same_level(e: Evidence, few: int, many: int) -> Finding:
    """Whether the last error of many clients is that of few, give or take."""
    last = int(e.curve("dualfl", nodes=few).rounds[-1])
    left = [error(e.curve("dualfl", nodes=nodes), last) for nodes in (few, many)]
    ours = (
        f"{left[1]:.1e} with {many} clients, {left[1] / left[0]:.1f} times that with {few}, at round {last}"
    )
    return judged(left[1] <= 5 * left[0], ours, "at most 5 times the error")
