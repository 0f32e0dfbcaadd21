"""How far from a stationary point a method is at the end, for weakly and strongly heterogeneous agents."""

from __future__ import annotations

import numpy as np

from holdfast_papers.evidence import Curve, Evidence, scientific_text

GAP = "grad_norm2"
CASES = ("weak", "strong")  # strong: the data of the authors' code
TEXT = "text"  # strong as the text describes it: a second reading
SGD = ("fedpd-sgd", "fedavg-sgd")
FLAT = 0.5  # a curve that stalls keeps more than this share of its gap in the last twelfth of the rounds


def preset(case: str, label: str) -> str:
    return f"figure-2-{case}-sgd" if label in SGD else f"figure-2-{case}"


def curve(e: Evidence, case: str, label: str) -> Curve:
    return e.curve(label, preset(case, label))


def gap(e: Evidence, case: str, label: str) -> np.ndarray:
    """||grad f||^2 after the last round, [seeds]."""
    return curve(e, case, label).final(GAP)


def decades(e: Evidence, case: str, label: str) -> np.ndarray:
    """The same as a power of ten: margins of claims are in decades."""
    return np.asarray(np.log10(gap(e, case, label)))


def below(e: Evidence, label: str, other: str) -> list[np.ndarray]:
    """By how many decades a method is below another, in both cases."""
    return [decades(e, case, other) - decades(e, case, label) for case in CASES]


def at_most(e: Evidence, label: str, power: float) -> list[np.ndarray]:
    """By how many decades a gap is below 10^power, in both cases."""
    return [power - decades(e, case, label) for case in CASES]


def at_least(e: Evidence, label: str, power: float) -> list[np.ndarray]:
    """By how many decades a gap is above 10^power, in both cases."""
    return [decades(e, case, label) - power for case in CASES]


def in_both(e: Evidence, label: str) -> str:
    return ", ".join(f"{case} {scientific_text(gap(e, case, label))}" for case in CASES)


def left(e: Evidence, case: str, label: str) -> np.ndarray:
    """What the last twelfth of the rounds leaves of the gap that was there before, [seeds]."""
    path = curve(e, case, label).path(GAP)
    return np.asarray(path[:, -1] / path[:, -1 - max(1, path.shape[1] // 12)])


def flat(e: Evidence, case: str, label: str) -> np.ndarray:
    """By how many decades what is left is above ``FLAT``, [seeds]."""
    return np.asarray(np.log10(left(e, case, label) / FLAT))


def left_in_words(e: Evidence, label: str) -> str:
    shares = ", ".join(f"{case} {np.median(left(e, case, label)):.2f}" for case in CASES)
    return f"left of it in the last twelfth: {shares}"
