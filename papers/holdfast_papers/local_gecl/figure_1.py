"""Fig. 1: curves, heterogeneity and number of local steps, on a ring (a-c) and with a server (d-f)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from holdfast_papers.base import (
    Claim,
    Finding,
    Layout,
    Line,
    Panel,
    PaperExperiment,
    Preset,
    judged_by_seeds,
    not_comparable,
)
from holdfast_papers.evidence import Curve, Evidence, mean_text
from holdfast_papers.local_gecl.common import (
    ON_A_GRAPH,
    WITH_A_SERVER,
    ahead,
    final_accuracy,
    in_preset,
    small,
    within,
)


class Network(NamedTuple):
    """One row of the figure: its presets, and the labels of its methods."""

    words: str
    by_h: str
    by_k: str
    lines: list[Line]

    def at_h(self, e: Evidence, method: int, h: str) -> Curve:
        return e.curve(self.lines[method].algorithm, self.by_h, h=h)

    def at_k(self, e: Evidence, method: int, steps: str) -> Curve:
        return e.curve(self.lines[method].algorithm, self.by_k, local_steps=steps)


GECL, SCAFFOLD, PLAIN = range(3)  # the order of the lines
RING = Network("On a ring", "figure-1-ring-h", "figure-1-ring-k", ON_A_GRAPH)
SERVER = Network("With a server", "figure-1-server-h", "figure-1-server-k", WITH_A_SERVER)
HETEROGENEOUS, HOMOGENEOUS = "0.1", "inf"


def loss_falls_faster(e: Evidence, network: Network) -> Finding:
    plain = network.at_h(e, PLAIN, HETEROGENEOUS)
    moments = [plain.rounds[-1] // 4, plain.rounds[-1] // 2, plain.rounds[-1]]
    gaps = [
        plain.at("train_loss", r) - network.at_h(e, method, HETEROGENEOUS).at("train_loss", r)
        for method in (GECL, SCAFFOLD)
        for r in moments
    ]
    ours = f"lower by at least {min(gap.mean() for gap in gaps):.3f}"
    needed = f"lower mean loss at rounds {', '.join(map(str, moments))}"
    return judged_by_seeds(gaps, ours, needed)


def ahead_of_plain(e: Evidence, network: Network) -> Finding:
    gap = final_accuracy(network.at_h(e, GECL, HETEROGENEOUS)) - final_accuracy(
        network.at_h(e, PLAIN, HETEROGENEOUS)
    )
    return ahead(e, gap, 4, f"{mean_text(gap)} points")


def alike(e: Evidence, network: Network) -> Finding:
    pairs = [
        tuple(final_accuracy(network.at_h(e, method, h)) for method in (GECL, SCAFFOLD))
        for h in e.swept("h", network.by_h)
    ]
    worst = max((own - other for own, other in pairs), key=lambda gap: abs(gap.mean()))
    return judged_by_seeds(
        [margin for pair in pairs for margin in within(0.5, *pair)],
        f"largest difference {mean_text(worst)} points",
        "means within 0.5 points for all h",
    )


def flat_in_h(e: Evidence, network: Network) -> Finding:
    own, plain = (
        [final_accuracy(network.at_h(e, method, h)) for h in e.swept("h", network.by_h)]
        for method in (GECL, PLAIN)
    )
    spread, of_plain = (np.ptp(np.mean(ends, axis=1)) for ends in (own, plain))
    ours = f"{spread:.2f} points; {network.lines[PLAIN].name} {of_plain:.2f}"
    if e.full:
        return judged_by_seeds(within(2, *own), ours, "spread of the means at most 2 points")
    return not_comparable(ours, "after a few rounds accuracy still depends on h for every method")


def plain_suffers(e: Evidence, network: Network) -> Finding:
    loss = final_accuracy(network.at_h(e, PLAIN, HOMOGENEOUS)) - final_accuracy(
        network.at_h(e, PLAIN, HETEROGENEOUS)
    )
    return ahead(e, loss, 4, f"{mean_text(loss)} points")


def many_steps_help(e: Evidence, network: Network) -> Finding:
    steps = e.swept("local_steps", network.by_k)
    one, many = "1", "64" if e.full else steps[-1]
    gain = final_accuracy(network.at_k(e, GECL, many)) - final_accuracy(network.at_k(e, GECL, one))
    least, needed = (3, "more than 3 points") if e.full else (0, "more than 0: the sign")
    return judged_by_seeds([gain - least], f"{mean_text(gain)} points from K = 1 to {many}", needed)


def flat_in_k(e: Evidence, network: Network) -> Finding:
    """Whether accuracy no longer depends on K from 64 on."""
    steps = e.swept("local_steps", network.by_k)
    if not e.full:
        return not_comparable(f"K up to {steps[-1]}", "fewer steps than 64")
    ends = [final_accuracy(network.at_k(e, GECL, k)) for k in steps if int(k) >= 64]
    ours = ", ".join(mean_text(end) for end in ends) + " % for K = 64, 128, 256"
    return judged_by_seeds(within(2, *ends), ours, "within 2 points")


def server_is_faster(e: Evidence) -> Finding:
    ring, server = (network.at_h(e, GECL, HETEROGENEOUS) for network in (RING, SERVER))
    quarter = ring.rounds[-1] // 4
    gap = ring.at("train_loss", quarter) - server.at("train_loss", quarter)
    ours = f"loss lower by {mean_text(gap, 3)} at round {quarter}"
    return judged_by_seeds([gap], ours, "lower mean loss with a server")


def _claims(network: Network) -> list[Claim]:
    corrected = f"Local G-ECL and {network.lines[SCAFFOLD].name}"
    plain, where = network.lines[PLAIN].name, network.words

    def of(check: Callable[[Evidence, Network], Finding]) -> Callable[[Evidence], Finding]:
        return lambda e: check(e, network)

    return [
        Claim(
            f"{where}, the loss of {corrected} falls faster than that of {plain}",
            "curves",
            of(loss_falls_faster),
        ),
        Claim(
            f"{where}, Local G-ECL ends above {plain} on very heterogeneous nodes",
            "curves",
            of(ahead_of_plain),
        ),
        Claim(
            f"{where}, {corrected} can hardly be told apart",
            "curves",
            of(alike),
            kind="ours" if network is RING else "paper",  # our D-SCAFFOLD is Local G-ECL but for one gradient
        ),
        Claim(f"{where}, heterogeneous nodes cost Local G-ECL nothing", "flat in h", of(flat_in_h)),
        Claim(
            f"{where}, {plain} loses accuracy as nodes become heterogeneous",
            "falls as h falls",
            of(plain_suffers),
        ),
        Claim(f"{where}, Local G-ECL gains from many local steps", "lower at K = 1", of(many_steps_help)),
        Claim(f"{where}, more than 64 local steps change little", "maintained (K ≥ 64)", of(flat_in_k)),
    ]


def _panels(network: Network, letters: str) -> list[Panel]:
    by_h, by_k = in_preset(network.lines, network.by_h), in_preset(network.lines, network.by_k)
    curves = in_preset(network.lines, network.by_h, h=HETEROGENEOUS)
    return [
        Panel(f"({letters[0]}) {network.words.lower()}, h = 0.1", curves, y="train_loss"),
        Panel(f"({letters[1]}) heterogeneity of the nodes", by_h, x="h", x_label="h"),
        Panel(f"({letters[2]}) local steps", by_k, x="local_steps", x_label="K"),
    ]


# More and smaller steps than elsewhere at small scale: with few large ones Local G-ECL and SCAFFOLD lie
# further apart.
SMALL_H = small(
    "evaluate_every=10",
    "problem.partition.h=[0.1,inf]",
    "algorithm.local_steps=16",
    "algorithm.lr=0.0125",
)
SMALL_K = small("algorithm.local_steps=[1,10]")

FIGURE_1 = PaperExperiment(
    id="figure-1",
    title="Fig. 1: curves, accuracy against h and against K, on a ring and with a server",
    presets=[
        Preset(RING.by_h, SMALL_H),
        Preset(RING.by_k, SMALL_K),
        Preset(SERVER.by_h, SMALL_H),
        Preset(SERVER.by_k, SMALL_K),
    ],
    claims=[
        *_claims(RING),
        *_claims(SERVER),
        Claim("Local G-ECL converges faster with a server than on a ring", "curves", server_is_faster),
    ],
    layout=Layout([*_panels(RING, "abc"), *_panels(SERVER, "def")]),
)
