"""Figs. 3, 4 and 8: accuracy and loss over the rounds on a ring, for other h, other K and another model."""

from __future__ import annotations

import numpy as np

from holdfast_papers.base import Claim, Finding, PaperExperiment, Preset, judged, not_comparable
from holdfast_papers.evidence import Evidence, mean_text, mean_texts
from holdfast_papers.local_gecl.common import CORRECTED, ON_A_GRAPH, accuracy_and_loss, final_accuracy, small

# --- Fig. 3 ------------------------------------------------------------------------------------------------


def curves_overlap(e: Evidence) -> Finding:
    gaps = {}
    for algorithm in CORRECTED:
        curves = [e.curve(algorithm, h=h) for h in e.swept("h")]
        paths = np.array([100 * curve.path("test_accuracy").mean(0) for curve in curves])  # [h, rounds]
        after_start = curves[0].rounds > 0
        at = int(np.argmax(np.ptp(paths, axis=0) * after_start))
        gaps[algorithm] = (
            float(np.ptp(paths[:, at])),
            int(curves[0].rounds[at]),
            float(np.ptp(paths[:, -1])),
        )
    words = [f"{name} {gap:.1f} (round {r}), {last:.1f} at the end" for name, (gap, r, last) in gaps.items()]
    ours = f"largest difference between h: {'; '.join(words)}"
    if not e.full:
        return not_comparable(ours, "the curves are still rising after a few rounds")
    return judged(
        max(gap for gap, _, _ in gaps.values()) <= 2, ours, "means within 2 points at every checkpoint"
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
    return judged(bool(np.all(np.diff([v.mean() for v in means]) > 0)), ours, "rises with h")


FIGURE_3 = PaperExperiment(
    id="figure-3",
    title="Fig. 3: curves for h = 0.1, 0.5 and infinity, ring, K = 64",
    presets=[Preset("figure-3", small("evaluate_every=10"))],
    claims=[
        Claim("The curves of the corrected methods overlap for all h", "overlap", curves_overlap),
        Claim("Local G-ECL and D-SCAFFOLD have the same curves", "overlap", same_method),
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
    least = min(points.mean() for points in gains.values())
    text = f"{mean_texts(gains)} points from K = {few} to {many}"
    if e.full:
        return judged(least >= 3, text, "at least 3 points for all methods")
    return judged(least > 0, text, "more than 0: the sign")


def little_beyond(e: Evidence) -> Finding:
    many, more = e.swept("local_steps")[1:]
    gains = {algorithm: gain(e, algorithm, many, more) for algorithm in CORRECTED}
    text = f"{mean_texts(gains)} points from K = {many} to {more}"
    if not e.full:
        return not_comparable(text, "fewer steps than the 64 beyond which little is gained")
    return judged(max(abs(points.mean()) for points in gains.values()) <= 2, text, "within 2 points")


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


def best_of_steps(e: Evidence, algorithm: str) -> np.ndarray:
    """Final accuracy in percent at the algorithm's best step, [seeds]."""
    found = [final_accuracy(e.curve(algorithm, lr=lr)) for lr in e.swept("lr")]
    return max(found, key=lambda seeds: float(seeds.mean()))


def lenet_above_gossip(e: Evidence) -> Finding:
    gap = best_of_steps(e, "local-gecl") - best_of_steps(e, "gossip")
    least, needed = (1, "mean at least 1 point") if e.full else (0, "more than 0: the sign")
    return judged(gap.mean() >= least and gap.mean() > 0, f"{mean_text(gap)} points", needed)


def lenet_as_scaffold(e: Evidence) -> Finding:
    gap = best_of_steps(e, "local-gecl") - best_of_steps(e, "d-scaffold")
    return judged(abs(gap.mean()) <= 1, f"{mean_text(gap)} points", "mean within 1 point")


FIGURE_8 = PaperExperiment(
    id="figure-8",
    title="Fig. 8: LeNet on CIFAR-10, ring, h = 0.5, K = 64",
    presets=[
        Preset(
            "figure-8",
            [
                "rounds=30",
                "seeds=[0]",
                "evaluate_every=15",
                "problem.batch_size=16",
                "algorithm.local_steps=16",
                "algorithm.lr=[0.05]",
            ],
        )
    ],
    claims=[
        Claim("Local G-ECL ends above Gossip with a convolutional network too", "curves", lenet_above_gossip),
        Claim("It is as good as D-SCAFFOLD", "curves", lenet_as_scaffold),
    ],
    layout=accuracy_and_loss(ON_A_GRAPH, each="lr"),
)
