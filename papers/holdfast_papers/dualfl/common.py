"""What the experiments of the paper share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast_papers.base import Finding, Line, Panel, judged
from holdfast_papers.evidence import Curve, Evidence

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
    """Relative energy error after ``round``, mean over the seeds."""
    return float(curve.at(ERROR, round).mean())


def lowest_error(e: Evidence, algorithm: str, round: int) -> float:
    """The error after ``round`` of the setting that is best at that round, among those swept."""
    curves = [curve for curve in e.curves() if curve.algorithm == algorithm and not curve.broke_off]
    return min((error(curve, round) for curve in curves), default=math.inf)


def rho_hardly_matters(e: Evidence) -> Finding:
    """Whether the last errors for all rho are within a factor of 2."""
    curves = {rho: e.curve("dualfl", rho=rho) for rho in e.swept("rho")}
    errors = {rho: error(curve, int(curve.rounds[-1])) for rho, curve in curves.items()}
    ours = ", ".join(f"rho {rho}: {left:.2e}" for rho, left in errors.items())
    return judged(
        max(errors.values()) <= 2 * min(errors.values()), f"last errors {ours}", "within a factor of 2"
    )


def rivals(e: Evidence) -> list[str]:
    """The methods other than DualFL."""
    return [name for name in dict.fromkeys(c.algorithm for c in e.curves()) if name != "dualfl"]


def below_all_others(e: Evidence, rounds: Sequence[int]) -> Finding:
    """Whether DualFL is at most 5 % above the best setting of the best rival, in each of ``rounds``."""
    dualfl = e.curve("dualfl")
    best = {r: min(rivals(e), key=lambda name: lowest_error(e, name, r)) for r in rounds}
    ratios = {r: error(dualfl, r) / lowest_error(e, best[r], r) for r in rounds}
    ours = ", ".join(f"round {r}: {ratios[r]:.2g} of {best[r]}" for r in rounds)
    needed = "at most 1.05 times the best rival, each rival at its best setting for that round"
    return judged(max(ratios.values()) <= 1.05, ours, needed)


def same_rate(e: Evidence, few: int, many: int) -> Finding:
    """Whether the error of many clients shrinks as fast as that of few, after a third of the rounds."""
    last = int(e.curve("dualfl", nodes=few).rounds[-1])
    first = last // 3
    factors = []
    for nodes in (few, many):
        curve = e.curve("dualfl", nodes=nodes)
        factors.append((error(curve, last) / error(curve, first)) ** (1 / (last - first)))
    ours = f"factor per round {factors[0]:.3f} with {few} clients, {factors[1]:.3f} with {many}"
    return judged(factors[1] <= factors[0] + 0.01, ours, f"at most 0.01 larger, from round {first} to {last}")


def same_level(e: Evidence, few: int, many: int) -> Finding:
    """Whether the last error of many clients is that of few, give or take."""
    last = int(e.curve("dualfl", nodes=few).rounds[-1])
    left = [error(e.curve("dualfl", nodes=nodes), last) for nodes in (few, many)]
    ours = (
        f"{left[1]:.1e} with {many} clients, {left[1] / left[0]:.1f} times that with {few}, at round {last}"
    )
    return judged(left[1] <= 5 * left[0], ours, "at most 5 times the error")
