"""Figs. 3, 4 and 8: accuracy and loss over the rounds on a ring, for other h, other K and another model."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from holdfast_papers.base import (
    Claim,
    Finding,
    PaperExperiment,
    Preset,
    judged,
    judged_by_seeds,
    not_comparable,
)
from holdfast_papers.evidence import Evidence, mean_text, mean_texts
from holdfast_papers.local_gecl.common import (
    CORRECTED,
    ON_A_GRAPH,
    accuracy_and_loss,
    final_accuracy,
    small,
    within,
)

# --- Fig. 3 ------------------------------------------------------------------------------------------------


FROM = 100  # the first rounds are a hundredth of the figure's width each
ASKED = 2  # points between two curves that overlap


class Spread(NamedTuple):
    """How far apart the curves of a method are for different h."""

    largest: float  # difference of any two mean curves
    round: int  # where that is
    last: np.ndarray  # at the end, [seeds]
    margins: list[np.ndarray]  # by how much any two are nearer than ``ASKED`` points in any round, [seeds]


def spread_over_h(e: Evidence, algorithm: str, since: int) -> Spread:
    curves = [e.curve(algorithm, h=h) for h in e.swept("h")]
    paths = np.array([100 * curve.path("test_accuracy") for curve in curves])  # [h, seeds, rounds]
    counted = curves[0].rounds >= since
    spread = np.ptp(paths.mean(1), axis=0) * counted
    at = int(np.argmax(spread))
    at_rounds = paths[:, :, counted].transpose(2, 0, 1)
    margins = [margin for values in at_rounds for margin in within(ASKED, *values)]
    return Spread(float(spread[at]), int(curves[0].rounds[at]), np.ptp(paths[:, :, -1], axis=0), margins)


def overlap_since(e: Evidence, since: int) -> Finding:
    found = {algorithm: spread_over_h(e, algorithm, since) for algorithm in CORRECTED}
    words = [
        f"{name} {spread.largest:.1f} (round {spread.round}), {mean_text(spread.last, 1)} at the end"
        for name, spread in found.items()
    ]
    ours = f"largest difference between h: {'; '.join(words)}"
    if not e.full:
        return not_comparable(ours, "the curves are still rising after a few rounds")
    return judged_by_seeds(
        [margin for spread in found.values() for margin in spread.margins],
        ours,
        f"means within {ASKED} points from round {since} on",
    )


def same_method(e: Evidence) -> Finding:
    gaps = []
    for h in e.swept("h"):
        ours, theirs = (e.curve(algorithm, h=h).path("test_accuracy").mean(0) for algorithm in CORRECTED)
        gaps.append(100 * float(np.abs(ours - theirs).max()))
    text = f"largest difference {max(gaps):.2f} points at any checkpoint"
    return judged(max(gaps) <= 2, text, "means within 2 points at every checkpoint")


def gossip_worsens(e: Evidence) -> Finding:
    means = [final_accuracy(e.curve("gossip", h=h)) for h in e.swept("h")]
    ours = ", ".join(f"h = {h}: {mean_text(v)} %" for h, v in zip(e.swept("h"), means, strict=True))
    return judged_by_seeds([b - a for a, b in pairwise(means)], ours, "rises with h")


FIGURE_3 = PaperExperiment(
    id="figure-3",
    title="Fig. 3: curves for h = 0.1, 0.5 and infinity, ring, K = 64",
    presets=[Preset("figure-3", small("evaluate_every=10"))],
    claims=[
        Claim(
            "The curves of the corrected methods overlap for all h, from round 100 on",
            "overlap",
            lambda e: overlap_since(e, FROM),
        ),
        Claim("They do so from the first checkpoint on", "–", lambda e: overlap_since(e, 1), kind="ours"),
        Claim("Local G-ECL and D-SCAFFOLD have the same curves", "overlap", same_method, kind="ours"),
        Claim("Gossip gets worse as the nodes become heterogeneous", "degraded as h falls", gossip_worsens),
    ],
    layout=accuracy_and_loss(ON_A_GRAPH, each="h"),
)

# --- Fig. 4 ------------------------------------------------------------------------------------------------


def gain(e: Evidence, algorithm: str, few: str, many: str) -> np.ndarray:
    """Points from few local steps to many, [seeds]."""
    ends = [final_accuracy(e.curve(algorithm, local_steps=steps)) for steps in (few, many)]
    return np.asarray(ends[1] - ends[0])


def steps_help(e: Evidence) -> Finding:
    few, many = e.swept("local_steps")[:2]
    gains = {line.name: gain(e, line.algorithm, few, many) for line in ON_A_GRAPH}
    text = f"{mean_texts(gains)} points from K = {few} to {many}"
    needed = "at least 3 points for all methods" if e.full else "more than 0: the sign"
    return judged_by_seeds([points - (3 if e.full else 0) for points in gains.values()], text, needed)


def little_beyond(e: Evidence) -> Finding:
    many, more = e.swept("local_steps")[1:]
    gains = {algorithm: gain(e, algorithm, many, more) for algorithm in CORRECTED}
    text = f"{mean_texts(gains)} points from K = {many} to {more}"
    if not e.full:
        return not_comparable(text, "fewer steps than the 64 beyond which little is gained")
    margins = [margin for points in gains.values() for margin in within(2, points, 0 * points)]
    return judged_by_seeds(margins, text, "within 2 points")


FIGURE_4 = PaperExperiment(
    id="figure-4",
    title="Fig. 4: curves for K = 1, 64 and 256 local steps, ring, h = 0.5",
    presets=[Preset("figure-4", small("algorithm.local_steps=[1,10,30]"))],
    claims=[
        Claim("All methods gain from many local steps", "improves with K", steps_help),
        Claim("The corrected methods gain little beyond 64 local steps", "little improvement", little_beyond),
    ],
    layout=accuracy_and_loss(ON_A_GRAPH, each="local_steps"),
)

# --- Fig. 8 ------------------------------------------------------------------------------------------------


def best_step(e: Evidence, algorithm: str) -> str:
    """The step with the highest mean final accuracy."""
    return max(e.swept("lr"), key=lambda lr: float(final_accuracy(e.curve(algorithm, lr=lr)).mean()))


def lenet_gap(e: Evidence, other: str) -> tuple[np.ndarray, str]:
    """Local G-ECL minus another method in points, each at its best step, [seeds]; and in words."""
    steps = {name: best_step(e, name) for name in ("local-gecl", other)}
    ends = [final_accuracy(e.curve(name, lr=lr)) for name, lr in steps.items()]
    gap = np.asarray(ends[0] - ends[1])
    words = ", ".join(f"{name} {lr}" for name, lr in steps.items())
    return gap, f"{mean_text(gap)} points; best steps {words}"


def lenet_above_gossip(e: Evidence) -> Finding:
    gap, ours = lenet_gap(e, "gossip")
    if not e.full:
        return not_comparable(ours, "after so few rounds the network is barely off its start")
    return judged_by_seeds([gap - 1], ours, "mean at least 1 point")


def lenet_as_scaffold(e: Evidence) -> Finding:
    gap, ours = lenet_gap(e, "d-scaffold")
    return judged(abs(gap.mean()) <= 1, ours, "mean within 1 point")


FIGURE_8 = PaperExperiment(
    id="figure-8",
    title="Fig. 8: LeNet on CIFAR-10, ring, h = 0.5, K = 64",
    presets=[
        Preset(
            "figure-8",
            [
                "rounds=4",  # nothing is judged but that two forms of one method agree
                "seeds=[0]",
                "evaluate_every=2",
                "problem.batch_size=16",
                "algorithm.local_steps=16",
                "algorithm.lr=[0.05]",
            ],
        )
    ],
    claims=[
        Claim("Local G-ECL ends above Gossip with a convolutional network too", "curves", lenet_above_gossip),
        Claim("It is as good as D-SCAFFOLD", "curves", lenet_as_scaffold, kind="ours"),
    ],
    layout=accuracy_and_loss(ON_A_GRAPH, each="lr"),
)
