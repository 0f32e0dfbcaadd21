"""Figs. 3 to 6: NET-FLEET with other numbers of local steps and nodes, other graphs and other step sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from holdfast_papers.base import (
    Claim,
    Finding,
    Kind,
    Layout,
    Line,
    PaperExperiment,
    Preset,
    judged_by_seeds,
    not_comparable,
)
from holdfast_papers.evidence import Evidence, mean_text
from holdfast_papers.net_fleet.common import SMALL, SPLITS, both_splits, final_accuracy

LINES = [Line("NET-FLEET", "net-fleet")]
SLACK = 3  # points by which the levels that the text states may be missed
TINY = 1e-9  # points: turns "at least" into "more than"
SMALL_LR = "algorithm.lr=0.02"
FIVE_SEEDS = "seeds=[0,1,2,3,4]"  # at full scale one tells the same: levels far from the printed ones
Check = Callable[[Evidence], Finding]


def along(e: Evidence, key: str, split: str) -> np.ndarray:
    """Final accuracy in percent for each value of a swept key, [values, seeds]."""
    curves = [e.curve("net-fleet", partition=split, **{key: value}) for value in e.swept(key)]
    return np.array([final_accuracy(curve) for curve in curves])


def listed(e: Evidence, key: str, splits: Sequence[str]) -> str:
    """``homogeneous nodes 95.10 % (1), ...`` for a verdict."""
    parts = []
    for split in splits:
        found = zip(e.swept(key), along(e, key, split), strict=True)
        values = [f"{mean_text(seeds, unit='%')} ({value})" for value, seeds in found]
        parts.append(f"{SPLITS[split]} {', '.join(values)}")
    return "; ".join(parts)


def rises(key: str, splits: Sequence[str], slack: float) -> Check:
    """Accuracy never falls by more than ``slack`` points along ``key``, and rises from end to end."""

    def check(e: Evidence) -> Finding:
        found = [along(e, key, split) for split in splits]
        steady = [step + slack + TINY for values in found for step in np.diff(values, axis=0)]
        higher = [values[-1] - values[0] for values in found]
        rise = ", ".join(mean_text(points) for points in higher)
        needed = "up from end to end, never down" + (f" by more than {slack:g}" if slack else "")
        ours = f"up by {rise} points: {listed(e, key, splits)}"
        return judged_by_seeds([*higher, *steady], ours, needed)

    return check


def no_worse(key: str, split: str, slack: float) -> Check:
    """At the last value of ``key`` accuracy is at most ``slack`` points below that at the first."""

    def check(e: Evidence) -> Finding:
        found = along(e, key, split)
        change = found[-1] - found[0]
        ours = f"{mean_text(change)} points from end to end: {listed(e, key, [split])}"
        return judged_by_seeds([change + slack + TINY], ours, f"at least -{slack:g} points")

    return check


def level(key: str, split: str, values: slice, low: float = 0, high: float = 100) -> Check:
    """At these values of ``key`` the accuracy, give or take ``SLACK``, is in the range that is stated."""

    def check(e: Evidence) -> Finding:
        ours = listed(e, key, [split])
        if not e.full:
            return not_comparable(ours, "a smaller model, fewer rounds and other steps")
        found = along(e, key, split)[values]
        margins = [seeds - low + SLACK + TINY if low else high + SLACK + TINY - seeds for seeds in found]
        names = ", ".join(e.swept(key)[values])
        wanted = f"above {low - SLACK:g} %" if low else f"below {high + SLACK:g} %"
        return judged_by_seeds(margins, ours, f"{wanted} at {names}")

    return check


def spread(key: str, split: str, most: float) -> Check:
    """Final accuracies differ by at most ``most`` points."""

    def check(e: Evidence) -> Finding:
        apart = np.ptp(along(e, key, split), axis=0)
        ours = f"{mean_text(apart)} points: {listed(e, key, [split])}"
        return judged_by_seeds([most - apart], ours, f"at most {most:g} points")

    return check


def alike(e: Evidence) -> Finding:
    """Fig. 4: with homogeneous nodes the number of nodes matters less than with heterogeneous ones."""
    iid, shards = along(e, "nodes", "iid"), along(e, "nodes", "shards")
    apart = np.ptp(iid, axis=0)
    if e.full:
        needed = "all at least 94 %, and within 1.5 points"
        return judged_by_seeds([iid.min(0) - 94, 1.5 - apart], listed(e, "nodes", ["iid"]), needed)
    others = np.ptp(shards, axis=0)
    ours = f"spread {mean_text(apart)} points, with heterogeneous nodes {mean_text(others)}"
    return judged_by_seeds([others - apart], ours, "less than with heterogeneous nodes: the sign")


def stays_low(key: str, words: str, most: float, kind: Kind = "paper") -> list[Claim]:
    """For both splits: below ``most`` % at the first value of ``key``; ``words`` say it."""
    return [
        Claim(f"{words}, {nodes}", f"below {most:g} %", level(key, split, slice(1), high=most), kind)
        for split, nodes in SPLITS.items()
    ]


def gets_far(key: str, words: str, values: slice, kind: Kind = "paper") -> list[Claim]:
    """For both splits: above 95 % at ``values`` of ``key``; ``words`` say it."""
    return [
        Claim(f"{words}, {nodes}", "above 95 %", level(key, split, values, low=95), kind)
        for split, nodes in SPLITS.items()
    ]


def low_and_high(
    key: str, low: str, most: float, high: str, values: slice, kind: Kind = "paper"
) -> list[Claim]:
    """Both, for homogeneous nodes and then for heterogeneous ones."""
    pairs = zip(stays_low(key, low, most, kind), gets_far(key, high, values, kind), strict=True)
    return [claim for pair in pairs for claim in pair]


FIGURE_3 = PaperExperiment(
    id="figure-3",
    title="Fig. 3: local steps K = 1, 8, 10 and 20 on MNIST, 50 nodes",
    presets=[Preset("figure-3", [*SMALL, SMALL_LR, FIVE_SEEDS, "algorithm.local_steps=[1,4,10]"])],
    claims=[
        Claim(
            "More local steps, higher accuracy, with homogeneous and heterogeneous nodes",
            "increases as K increases",
            rises("local_steps", ["iid", "shards"], slack=0.5),
        ),
        *gets_far("local_steps", "Eight and more steps get far", slice(1, None)),
    ],
    layout=Layout(both_splits(LINES, each="local_steps"), columns=2),
)

FIGURE_3_ONE_STEP = PaperExperiment(
    id="figure-3-one-step",
    title="Fig. 3: one local step per round, five seeds",
    presets=[Preset("figure-3-one-step", [*SMALL, SMALL_LR])],
    claims=stays_low("local_steps", "One step per round stays low", 80),
    layout=Layout(both_splits(LINES, each="local_steps"), columns=2),
)

FIGURE_4 = PaperExperiment(
    id="figure-4",
    title="Fig. 4: 10, 30, 50 and 70 nodes on MNIST, K = 10",
    presets=[Preset("figure-4", [*SMALL, SMALL_LR, "problem.nodes=[4,8,24]", "algorithm.local_steps=5"])],
    claims=[
        Claim("Homogeneous nodes: any number of them does as well", "95 % or 96 to 97.5 %", alike),
        Claim(
            "Heterogeneous nodes: more nodes, higher accuracy",
            "92.5 % (10) to 97.5 % (70)",
            rises("nodes", ["shards"], slack=1),
        ),
    ],
    layout=Layout(both_splits(LINES, each="nodes"), columns=2),
    note="The paper gives two figures for homogeneous nodes, 95 % and 96 to 97.5 %: asked for is 94 %. Of "
    "the rise with heterogeneous nodes the sign is judged, and its size said. More nodes also mean more "
    "data, as every heterogeneous node brings 400 samples.",
)

FIGURE_5 = PaperExperiment(
    id="figure-5",
    title="Fig. 5: random graphs with 10, 30, 50 and 90 % of all links, MNIST, 50 nodes, K = 10",
    presets=[
        Preset(
            "figure-5",
            [*SMALL, SMALL_LR, "network.topology.p=[0.3,0.5,0.9]", "algorithm.local_steps=5"],
        )
    ],
    claims=[
        Claim("Homogeneous nodes: the graph does not matter", "96 % for all", spread("p", "iid", 1)),
        Claim(
            "Heterogeneous nodes: many links are no worse than few",
            "increases slightly",
            no_worse("p", "shards", slack=0.5),
        ),
        Claim("Heterogeneous nodes: insensitive to the graph", "insensitive", spread("p", "shards", 4)),
    ],
    layout=Layout(both_splits(LINES, each="p"), columns=2),
)

FIGURE_6 = PaperExperiment(
    id="figure-6",
    title="Fig. 6: steps of 0.0005, 0.001, 0.005 and 0.01 on MNIST, 50 nodes, K = 10",
    presets=[
        Preset(
            "figure-6", [*SMALL, FIVE_SEEDS, "algorithm.lr=[0.0025,0.005,0.02]", "algorithm.local_steps=5"]
        )
    ],
    claims=[
        Claim(
            "Larger steps are faster, with homogeneous and heterogeneous nodes",
            "faster",
            rises("lr", ["iid", "shards"], slack=0),
        ),
        *low_and_high("lr", "The smallest step stays low", 75, "The largest gets far", slice(-1, None)),
    ],
    layout=Layout(both_splits(LINES, each="lr"), columns=2),
)
