"""What is measured in Figs. 1 and 2: accuracies at equal delay, and delays to equal accuracy."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from holdfast_papers.evidence import Curve, Evidence

SPLITS = {"iid": "homogeneous nodes", "classes-per-node": "one class per node"}
METHODS = {
    "dgd": "DGD",
    "sporadic-aggregations": "Sporadic Aggregations",
    "sporadic-sgds": "Sporadic SGDs",
    "dspodfl": "DSpodFL",
}
LINKS_MATTER = ("sporadic-aggregations", "dspodfl")  # only these are in the preset with links of both ends
RAW, PRINTED = "tau_raw", "tau_total"  # total delay as in the authors' code, and normalised as printed
MARKS = (0.25, 0.5, 1.0)  # of the total delay that all methods reach
LAST = 0.2  # accuracies are means over this last part up to a mark: single evaluations swing


class Case(NamedTuple):
    """Curves of one figure: its preset, how the data are split, and whether each end draws its links."""

    figure: str
    split: str
    each_end: bool = False

    def curve(self, e: Evidence, method: str) -> Curve:
        """With what the preset of the figure's start, which evaluates more often, has of the same method."""
        own, start = self.preset(method), f"{self.figure}-start"
        presets = {self.preset(method) for method in METHODS}
        if own != self.figure or start not in e.runs or not has(e, start, method):
            return e.paired(*presets).curve(method, own, partition=self.split)
        both = e.paired(*presets, start)
        return evaluated_more_often(
            *(both.curve(method, preset, partition=self.split) for preset in (own, start))
        )

    def preset(self, method: str) -> str:
        return self.figure + ("-each-end" if self.each_end and method in LINKS_MATTER else "")

    @property
    def words(self) -> str:
        return SPLITS[self.split] + (", links drawn by each end" if self.each_end else "")


def has(e: Evidence, preset: str, method: str) -> bool:
    """Whether ``method`` is among those of ``preset``."""
    return any(curve.algorithm == method for curve in e.curves(preset))


def evaluated_more_often(curve: Curve, start: Curve) -> Curve:
    """``curve`` and what was recorded between its rounds by ``start``, the same method's first rounds."""
    seeds = [{**early, **late} for early, late in zip(start.group.seeds, curve.group.seeds, strict=True)]
    return Curve(replace(curve.group, seeds=seeds))


def accuracy_at(curve: Curve, end: float, axis: str = RAW) -> np.ndarray:
    """Mean test accuracy in percent over the last fifth up to ``end`` on ``axis``, [seeds].

    Between two evaluations it is taken to lie on a straight line.
    """
    places = np.linspace((1 - LAST) * end, end, 21)
    paths = zip(curve.path(axis), curve.path("test_accuracy"), strict=True)
    return np.array([100 * np.interp(places, spent, accuracy).mean() for spent, accuracy in paths])


def final_accuracy(curve: Curve) -> np.ndarray:
    """Mean test accuracy over the last fifth of the iterations in percent, [seeds]."""
    return accuracy_at(curve, float(curve.rounds[-1]), "round")


def delays_reached(case: Case, e: Evidence, axis: str) -> list[float]:
    """The delays at which methods are compared: ``MARKS`` of the one that all of them reach."""
    end = min(float(case.curve(e, method).final(axis).min()) for method in METHODS)
    return [mark * end for mark in MARKS]


def saving(own: Curve, rival: Curve, axis: str, goals: np.ndarray) -> np.ndarray:
    """How many times less of ``axis`` ``own`` takes than ``rival`` to the accuracies ``goals``, all [seeds].

    0 where ``own`` never gets there, and not a number where neither does.
    """
    needed = [
        [curve.first(axis, "test_accuracy", low=goal)[seed] for seed, goal in enumerate(goals)]
        for curve in (rival, own)
    ]
    with np.errstate(invalid="ignore"):
        return np.asarray(np.array(needed[0]) / np.array(needed[1]))


def processing_saving(e: Evidence, figure: str, split: str) -> np.ndarray:
    """How many times less processing delay sporadic SGDs take than DGD to the same accuracy, [seeds].

    The accuracy is 95 % of the best that both of them reach.
    """
    own, dgd = (Case(figure, split).curve(e, method) for method in ("sporadic-sgds", "dgd"))
    goals = 0.95 * np.minimum(own.best("test_accuracy"), dgd.best("test_accuracy"))
    return saving(own, dgd, "tau_proc", goals)


def gradients_bought(e: Evidence, figure: str, split: str) -> np.ndarray:
    """How many times more gradients sporadic SGDs compute than DGD for the same processing delay, [seeds].

    In expectation mean(d) mean(1/d), which is never below 1.
    """
    own, dgd = (Case(figure, split).curve(e, method) for method in ("sporadic-sgds", "dgd"))
    rates = [c.final("gradient_evaluations") / c.final("tau_proc") for c in (own, dgd)]
    return np.asarray(rates[0] / rates[1])
