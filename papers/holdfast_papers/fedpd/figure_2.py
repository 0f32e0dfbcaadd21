"""Fig. 2: penalised logistic regression; which methods reach a stationary point."""

from __future__ import annotations

import numpy as np

from holdfast_papers.base import (
    Claim,
    Finding,
    Layout,
    Line,
    Panel,
    PaperExperiment,
    Preset,
    judged,
    not_comparable,
)
from holdfast_papers.evidence import Curve, Evidence, scientific_text

STEPS, SGD, FULL = "figure-2", "figure-2-sgd", "figure-2-full-batch"
GAP = "grad_norm2"
CASES = ("weak", "strong")
PRESETS = {"fedpd-sgd": SGD, "fedavg-sgd": SGD, "fedavg-gd": FULL}


def curve(e: Evidence, case: str, label: str) -> Curve:
    return e.curve(label, PRESETS.get(label, STEPS), heterogeneity=case)


def gap(e: Evidence, case: str, label: str) -> np.ndarray:
    """||grad f||^2 after the last round, [seeds]."""
    return curve(e, case, label).final(GAP)


def within(e: Evidence, label: str, low: float = 0, high: float = np.inf) -> bool:
    """Whether the gap of every seed is from ``low`` to ``high``, in both cases."""
    gaps = [gap(e, case, label) for case in CASES]
    return all(((found >= low) & (found <= high)).all() for found in gaps)


def below(e: Evidence, label: str, other: str) -> bool:
    """Whether the gap of every seed is below that of another method, in both cases."""
    return all((gap(e, case, label) < gap(e, case, other)).all() for case in CASES)


def in_both(e: Evidence, label: str) -> str:
    return ", ".join(f"{case} {scientific_text(gap(e, case, label))}" for case in CASES)


def converges_linearly(e: Evidence) -> Finding:
    decades = {}
    for case in CASES:
        path = np.log10(curve(e, case, "fedpd-gd").path(GAP).mean(0))
        middle = len(path) // 2
        decades[case] = (path[0] - path[middle], path[middle] - path[-1])
    even = all(0.5 <= second / first <= 2 for first, second in decades.values())
    goal = 1e-18 if e.full else 1e-9
    low = within(e, "fedpd-gd", high=goal)
    ours = f"{in_both(e, 'fedpd-gd')}; decades in each half: " + ", ".join(
        f"{case} {first:.1f} and {second:.1f}" for case, (first, second) in decades.items()
    )
    return judged(
        even and low, ours, f"at most {goal:g}, and as many decades in both halves, up to a factor of 2"
    )


FLAT = 0.5  # a curve that stalls keeps more than this share of its gap in the last twelfth of the rounds


def left(e: Evidence, case: str, label: str) -> float:
    """What the last twelfth of the rounds leaves of the gap that was there before."""
    path = curve(e, case, label).path(GAP).mean(0)
    return float(path[-1] / path[-1 - max(1, len(path) // 12)])


def left_in_words(e: Evidence, label: str, cases: tuple[str, ...] = CASES) -> str:
    shares = ", ".join(f"{case} {left(e, case, label):.2f}" for case in cases)
    return f"left of it in the last twelfth: {shares}"


def fedavg_stalls(e: Evidence) -> Finding:
    ours = f"{in_both(e, 'fedavg-gd')}; {left_in_words(e, 'fedavg-gd')}"
    if not e.full:
        return not_comparable(ours, "after so few rounds the gap still falls")
    flat = all(left(e, case, "fedavg-gd") > FLAT for case in CASES)
    holds = below(e, "fedpd-gd", "fedavg-gd") and within(e, "fedavg-gd", 1e-11, 1e-8) and flat
    return judged(holds, ours, f"1e-11 to 1e-8, and flat (above {FLAT})")


def vr_converges(e: Evidence) -> Finding:
    if e.full:
        return judged(within(e, "fedpd-vr", high=1e-12), in_both(e, "fedpd-vr"), "at most 1e-12")
    return judged(below(e, "fedpd-vr", "fedavg-gd"), in_both(e, "fedpd-vr"), "below FedAvg-GD: the sign")


def communications(e: Evidence, case: str, label: str) -> np.ndarray:
    """How many rounds communicated, [seeds]: all of FedPD-GD's do."""
    always = curve(e, case, "fedpd-gd")
    share: np.ndarray = curve(e, case, label).final("payload_bytes") / always.final("payload_bytes")
    return share * int(always.rounds[-1])


def skipping_stalls(e: Evidence) -> Finding:
    rounds = curve(e, "weak", "fedpd-gd").rounds[-1]
    used = {case: communications(e, case, "fedpd-gd-half") for case in CASES}
    spread = rounds / 15
    half = all((abs(used[case] - rounds / 2) <= spread).all() for case in CASES)
    stalls = below(e, "fedpd-gd", "fedpd-gd-half")
    if e.full:
        flat = all(left(e, case, "fedpd-gd-half") > FLAT for case in CASES)
        stalls = stalls and within(e, "fedpd-gd-half", low=1e-11) and flat
    counts = ", ".join(f"{case} {used[case].mean():.0f}" for case in CASES)
    needed = f"{rounds / 2:.0f} ± {spread:.0f} communications, " + (
        f"above 1e-11, and flat (above {FLAT})" if e.full else "above p = 0: the sign"
    )
    ours = f"{in_both(e, 'fedpd-gd-half')}; communications {counts}; {left_in_words(e, 'fedpd-gd-half')}"
    return judged(half and stalls, ours, needed)


def falling_chance_helps(e: Evidence) -> Finding:
    half, falling = gap(e, "strong", "fedpd-gd-half"), gap(e, "strong", "fedpd-gd-falling")
    ours = f"{scientific_text(falling)} against {scientific_text(half)} with p = 0.5"
    return judged(bool((falling < half).all()), ours, "below p = 0.5")


def fedprox_is_as_good_if_weak(e: Evidence) -> Finding:
    prox, pd = gap(e, "weak", "fedprox-vr"), gap(e, "weak", "fedpd-gd")
    ours = f"FedProx {scientific_text(prox)}, FedPD-GD {scientific_text(pd)}"
    return judged(bool((prox <= 10 * pd).all()), ours, "at most 10 times FedPD-GD's gap")


def fedprox_stalls_if_strong(e: Evidence) -> Finding:
    prox, pd = gap(e, "strong", "fedprox-vr"), gap(e, "strong", "fedpd-gd")
    ours = f"FedProx {scientific_text(prox)}, FedPD-GD {scientific_text(pd)}"
    if e.full:
        ours += f"; {left_in_words(e, 'fedprox-vr', ('strong',))}"
        stalls = (prox >= 1e-9).all() and left(e, "strong", "fedprox-vr") > FLAT
        return judged(bool(stalls), ours, f"at least 1e-9, and flat (above {FLAT})")
    return judged(bool((prox > pd).all()), ours, "above FedPD-GD: the sign")


def sgd_is_below_fedavgs(e: Evidence) -> Finding:
    better = below(e, "fedpd-sgd", "fedavg-sgd")
    ours = f"FedPD {in_both(e, 'fedpd-sgd')}; FedAvg {in_both(e, 'fedavg-sgd')}"
    if not e.full:
        return judged(better, ours, "below FedAvg-SGD: the sign")
    inside = within(e, "fedpd-sgd", 1e-7, 1e-4)
    return judged(better and inside, ours, "1e-7 to 1e-4, and below FedAvg-SGD")


def panel(title: str, case: str) -> Panel:
    names = {
        "FedPD-GD, p = 0": "fedpd-gd",
        "FedPD-GD, p = 0.5": "fedpd-gd-half",
        "FedPD-GD, p = (T − r)/T": "fedpd-gd-falling",
        "FedPD-VR": "fedpd-vr",
        "FedPD-SGD": "fedpd-sgd",
        "FedAvg-GD": "fedavg-gd",
        "FedAvg-SGD": "fedavg-sgd",
        "FedProx-VR": "fedprox-vr",
    }
    return Panel(
        title,
        [
            Line(name, label, {"heterogeneity": case}, PRESETS.get(label, STEPS))
            for name, label in names.items()
        ],
        x="payload_bytes",
        y=GAP,
        y_label="‖∇f‖²",
        log_y=True,
    )


SMALL = ["problem.nodes=20", "rounds=300"]
FIGURE_2 = PaperExperiment(
    id="figure-2",
    title="Fig. 2: stationary gap of FedPD, FedAvg and FedProx on weakly and strongly heterogeneous agents",
    presets=[
        Preset(STEPS, [*SMALL, "evaluate_every=4", "algorithm.fedpd-gd-falling.skip.rounds=300"]),
        Preset(SGD, [*SMALL, "rounds=100", "algorithm.local_steps=100"]),
        Preset(FULL, [*SMALL, "evaluate_every=4"]),
    ],
    claims=[
        Claim("FedPD-GD that never skips converges linearly", "3e-13 weak, 1e-22 strong", converges_linearly),
        Claim("FedAvg-GD does not converge", "stalls at 1.5e-10 weak, 1e-10 strong", fedavg_stalls),
        Claim("FedPD-VR converges too", "1e-14 weak, 3e-15 strong", vr_converges),
        Claim(
            "Half of the communication may be skipped, but then it stalls",
            "6e-10 weak, 1e-9 to 1e-8 strong, 300 communications",
            skipping_stalls,
        ),
        Claim("Skipping less and less often goes below skipping half", "1e-11 strong", falling_chance_helps),
        Claim(
            "FedProx is comparable to FedPD on weakly heterogeneous agents",
            "3e-13 both",
            fedprox_is_as_good_if_weak,
        ),
        Claim("FedProx stalls on strongly heterogeneous agents", "3e-8", fedprox_stalls_if_strong),
        Claim("FedPD-SGD ends below FedAvg-SGD", "1e-6, against 8e-4 and 5e-3", sgd_is_below_fedavgs),
    ],
    layout=Layout(
        [panel("(a) weakly heterogeneous", "weak"), panel("(b) strongly heterogeneous", "strong")], columns=2
    ),
)


def summable(e: Evidence) -> Finding:
    shares = {}
    for case in CASES:
        total = e.curve("fedpd", heterogeneity=case).path(GAP).cumsum(1)
        shares[case] = total[:, -1] / total[:, total.shape[1] // 2]
    ours = ", ".join(f"{case} {share.max():.4f}" for case, share in shares.items())
    needed = "at most 1.01: the sum of gaps is bounded, so their mean falls like 1/T"
    return judged(
        all((share <= 1.01).all() for share in shares.values()),
        f"sum over T rounds by that over T/2: {ours}",
        needed,
    )


TABLE_1 = PaperExperiment(
    id="table-1",
    title="Table I: FedPD's mean gap falls at least like 1/T without convexity",
    presets=[Preset("table-1", ["seeds=[0,1]", "rounds=200"])],
    claims=[Claim("T times the mean gap over T rounds stays bounded", "O(1/T), Theorem 1", summable)],
    layout=Layout(
        [
            Panel(
                f"{case}ly heterogeneous",
                [Line("FedPD-GD", "fedpd", {"heterogeneity": case})],
                y=GAP,
                y_label="‖∇f‖²",
                log_y=True,
            )
            for case in CASES
        ],
        columns=2,
    ),
)
