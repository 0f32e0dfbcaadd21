"""Fig. 1 and Table III: how much communication may be skipped for a given heterogeneity of the agents."""

from __future__ import annotations

import math

import numpy as np

from holdfast_papers.base import Circumstances, Claim, Finding, Layout, Line, Panel, PaperExperiment, judged
from holdfast_papers.evidence import Evidence, TableRow, fitted_power

L_ETA = (math.sqrt(5) - 1) / 8  # Table III's eta times L
TURN = (1 - 2 * L_ETA) / (1 + L_ETA)  # where C_3 is 1
BOUND, LINEAR, LOG = "C(p) of (12)", "Table III, linear", "Table III, logarithmic"
BEYOND = "C(p) far beyond the figure"


def c_3(p: float) -> float:
    return (p * (1 + L_ETA) + L_ETA) / (1 - L_ETA)


def bound(p: float) -> float:
    """C(p) of Remark 5 in units of eta^2 C_5 (N - 1)/N, as C_5 is open; finite at TURN, where 0/0 stands."""
    slope = 1 + L_ETA, 3 + L_ETA
    ratio = (1 - c_3(p) ** (1 / (1 - p))) / (1 - 2 * L_ETA - p * slope[0])
    return float((1 - p) * (ratio * p * slope[0] * (2 * L_ETA + p * slope[1])) ** 2)


def curves(where: Circumstances) -> list[TableRow]:
    """The allowed heterogeneity eps/G^2 = 3 C(p), and Table III's approximations through one point each."""
    small, large, far = 1e-3, 0.95, 0.995
    rows: list[TableRow] = [{"curve": BEYOND, "p": far, "c": bound(far), "c_3": c_3(far)}]
    for p in np.concatenate([np.geomspace(1e-3, 0.5, 40), 1 - np.geomspace(0.49, 1 - large, 60)]):
        rows.append({"curve": BOUND, "p": float(p), "c": bound(p), "c_3": c_3(p)})
        if p < TURN:
            rows.append({"curve": LINEAR, "p": float(p), "c": bound(small) * (p / small) ** 2, "c_3": c_3(p)})
        else:
            through = bound(large) / c_3(large) ** (2 / (1 - large))
            rows.append({"curve": LOG, "p": float(p), "c": through * c_3(p) ** (2 / (1 - p)), "c_3": c_3(p)})
    return rows


def turn(e: Evidence) -> Finding:
    p, c = e.column("p", curve=BOUND), e.column("c_3", curve=BOUND)
    crossings = np.flatnonzero(np.diff(c < 1))
    found = [float(p[i] + (1 - c[i]) * (p[i + 1] - p[i]) / (c[i + 1] - c[i])) for i in crossings]
    where = ", ".join(f"{crossing:.4f}" for crossing in found)
    right = len(found) == 1 and abs(found[0] - TURN) <= 1e-4 and c[0] < 1
    ours = f"C_3 crosses 1 at p = {where}" if found else "C_3 does not cross 1"
    return judged(bool(right), ours, "once, from below, within 0.0001")


def power_of_p(e: Evidence, low: float, high: float) -> float:
    """p of the fit C = c p^power over a range."""
    p, c = e.column("p", curve=BOUND), e.column("c", curve=BOUND)
    inside = (low <= p) & (p <= high)
    return fitted_power(p[inside], c[inside])


def quadratic_for_few(e: Evidence) -> Finding:
    power = power_of_p(e, 0, 0.01)
    return judged(abs(power - 2) <= 0.1, f"C(p) grows like p^{power:.2f} for p up to 0.01", "power 2 ± 0.1")


def quadratic_up_to_the_turn(e: Evidence) -> Finding:
    power = power_of_p(e, 0.1, TURN)
    ours = f"C(p) grows like p^{power:.2f} from p = 0.1 to {TURN:.2f}"
    return judged(abs(power - 2) <= 0.2, ours, "power 2 ± 0.2")


def logarithmic_for_many(e: Evidence) -> Finding:
    """ln C(p) (1 - p) / (2 ln C_3) tends to 1 where C(p) ~ C_3^(2/(1-p))."""
    (row,) = e.rows_where(curve=BEYOND)
    share = math.log(row["c"]) * (1 - row["p"]) / (2 * math.log(row["c_3"]))
    ours = f"ln C(p) is {share:.3f} of 2 ln C_3 / (1 - p) at p = {row['p']:.3f}"
    return judged(abs(share - 1) <= 0.1, ours, "1 ± 0.1")


def logarithmic_from_the_turn(e: Evidence) -> Finding:
    """C(p) / C_3^(2/(1-p)) is the same from TURN on."""
    p, c, c_3s = (e.column(name, curve=BOUND) for name in ("p", "c", "c_3"))
    ratios = (c / c_3s ** (2 / (1 - p)))[p > TURN]
    change = float(ratios.max() / ratios.min())
    ours = f"C(p) / C_3^(2/(1-p)) changes by a factor of {change:.3g} from p = {TURN:.2f} to {p.max():.2f}"
    return judged(change <= 2, ours, "at most 2")


FIGURE_1 = PaperExperiment(
    id="figure-1",
    title="Fig. 1 and Table III: skipped communication against heterogeneity, the theory's curve",
    compute=curves,
    claims=[
        Claim("C_3 is below 1 exactly for p < (1 − 2Lη)/(1 + Lη)", f"{TURN:.4f}", turn),
        Claim("Few skipped rounds: the bound grows like the square of p", "≈ 12 η²p²", quadratic_for_few),
        Claim("That holds up to where C_3 is 1", "whole range", quadratic_up_to_the_turn, kind="erratum"),
        Claim(
            "Almost all skipped: the bound grows like C_3 to the power 2/(1 − p)",
            "≈ 14 η² C_3^{2/(1−p)}",
            logarithmic_for_many,
        ),
        Claim("That holds from where C_3 is 1", "whole range", logarithmic_from_the_turn, kind="erratum"),
    ],
    layout=Layout(
        [
            Panel(
                "communication that may be skipped",
                [Line(name, name) for name in (BOUND, LINEAR, LOG)],
                x="c",
                y="p",
                by="curve",
                x_label="C(p), proportional to ε/G²",
                y_label="share of skipped rounds p",
                log_x=True,
            )
        ],
        columns=1,
    ),
    note="The paper's constant C_5 is open, so the curves are compared in shape.",
)
