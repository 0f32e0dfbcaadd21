"""Figs. 3 to 6: NET-FLEET with other numbers of local steps and nodes, other graphs and other step sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from holdfast_papers.base import Claim, Finding, Layout, Line, PaperExperiment, Preset, judged, not_comparable
from holdfast_papers.evidence import Evidence, mean_text
from holdfast_papers.net_fleet.common import SMALL, SPLITS, both_splits, final_accuracy

LINES = [Line("NET-FLEET", "net-fleet")]
SLACK = 3  # points by which the levels that the text states may be missed
SMALL_LR = "algorithm.lr=0.02"
Check = Callable[[Evidence], Finding]


def along(e: Evidence, key: str, split: str) -> np.ndarray:
    """Mean final accuracy in percent for each value of a swept key, [values]."""
    curves = [e.curve("net-fleet", partition=split, **{key: value}) for value in e.swept(key)]
    return np.array([final_accuracy(curve).mean() for curve in curves])


def listed(e: Evidence, key: str, splits: Sequence[str]) -> str:
    """``homogeneous nodes 95.10 % (1), ...`` for a verdict."""
    parts = []
    for split in splits:
        curves = {value: e.curve("net-fleet", partition=split, **{key: value}) for value in e.swept(key)}
        values = [f"{mean_text(final_accuracy(curve), unit='%')} ({v})" for v, curve in curves.items()]
        parts.append(f"{SPLITS[split]} {', '.join(values)}")
    return "; ".join(parts)


def rises(key: str, splits: Sequence[str], slack: float, gain: float = 0) -> Check:
    """Accuracy never falls by more than ``slack`` points along ``key``, and rises from end to end.

    At full scale by at least ``gain`` points.
    """

    def check(e: Evidence) -> Finding:
        found = [along(e, key, split) for split in splits]
        least = gain if e.full else 0
        steady = all(np.diff(values).min() >= -slack for values in found)
        higher = all(values[-1] - values[0] > 0 and values[-1] - values[0] >= least for values in found)
        needed = f"up by {f'at least {least:g} points' if least else 'more than 0'} from end to end"
        needed += f", never down by more than {slack:g}" if slack else ", never down"
        return judged(steady and higher, listed(e, key, splits), needed)

    return check


def no_worse(key: str, split: str, slack: float) -> Check:
    """At the last value of ``key`` accuracy is at most ``slack`` points below that at the first."""

    def check(e: Evidence) -> Finding:
        found = along(e, key, split)
        return judged(
            bool(found[-1] >= found[0] - slack),
            f"{found[-1] - found[0]:+.2f} points from end to end: {listed(e, key, [split])}",
            f"at least -{slack:g} points",
        )

    return check


def level(key: str, split: str, values: slice, low: float = 0, high: float = 100) -> Check:
    """At these values of ``key`` the accuracy, give or take ``SLACK``, is in the range that is stated."""

    def check(e: Evidence) -> Finding:
        ours = listed(e, key, [split])
        if not e.full:
            return not_comparable(ours, "a smaller model, fewer rounds and other steps")
        found = along(e, key, split)[values]
        holds = bool(np.all((found >= low - SLACK) & (found <= high + SLACK)))
        names = ", ".join(e.swept(key)[values])
        wanted = f"above {low - SLACK:g} %" if low else f"below {high + SLACK:g} %"
        return judged(holds, ours, f"{wanted} at {names}")

    return check


def spread(key: str, split: str, most: float) -> Check:
    """Final accuracies differ by at most ``most`` points."""

    def check(e: Evidence) -> Finding:
        apart = float(np.ptp(along(e, key, split)))
        return judged(
            apart <= most, f"{apart:.2f} points: {listed(e, key, [split])}", f"at most {most:g} points"
        )

    return check


def alike(e: Evidence) -> Finding:
    """Fig. 4: with homogeneous nodes the number of nodes matters less than with heterogeneous ones."""
    iid, shards = along(e, "nodes", "iid"), along(e, "nodes", "shards")
    if e.full:
        close = bool(iid.min() >= 94 and np.ptp(iid) <= 1.5)
        return judged(close, listed(e, "nodes", ["iid"]), "all at least 94 %, and within 1.5 points")
    ours = f"spread {np.ptp(iid):.2f} points, with heterogeneous nodes {np.ptp(shards):.2f}"
    return judged(bool(np.ptp(iid) < np.ptp(shards)), ours, "less than with heterogeneous nodes: the sign")


def low_and_high(key: str, low: str, most: float, high: str, values: slice) -> list[Claim]:
    """For both splits: below ``most`` % at the first value of ``key``, above 95 % at ``values``.

    ``low`` and ``high`` say it in words.
    """
    return [
        claim
        for split, words in SPLITS.items()
        for claim in (
            Claim(f"{low}, {words}", f"below {most:g} %", level(key, split, slice(1), high=most)),
            Claim(f"{high}, {words}", "above 95 %", level(key, split, values, low=95)),
        )
    ]


FIGURE_3 = PaperExperiment(
    id="figure-3",
    title="Fig. 3: local steps K = 1, 8, 10 and 20 on MNIST, 50 nodes",
    presets=[Preset("figure-3", [*SMALL, SMALL_LR, "algorithm.local_steps=[1,4,10]"])],
    claims=[
        Claim(
            "More local steps, higher accuracy, with homogeneous and heterogeneous nodes",
            "increases as K increases",
            rises("local_steps", ["iid", "shards"], slack=0.5),
        ),
        *low_and_high(
            "local_steps",
            "One step per round stays low",
            80,
            "Eight and more steps get far",
            slice(1, None),
        ),
    ],
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
            rises("nodes", ["shards"], slack=1, gain=2),
        ),
    ],
    layout=Layout(both_splits(LINES, each="nodes"), columns=2),
    note="The paper gives two figures for homogeneous nodes, 95 % and 96 to 97.5 %: asked for is 94 %. More "
    "nodes also mean more data, as every heterogeneous node brings 400 samples.",
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
    presets=[Preset("figure-6", [*SMALL, "algorithm.lr=[0.0025,0.005,0.02]", "algorithm.local_steps=5"])],
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
