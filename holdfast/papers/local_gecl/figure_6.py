"""Figs. 5 and 6: ring, double ring, complete graph and server; and the last two are the same method."""

from __future__ import annotations

import numpy as np
import torch

from holdfast.papers.base import (
    Circumstances,
    Claim,
    Experiment,
    Finding,
    Layout,
    Line,
    Panel,
    Preset,
    judged,
)
from holdfast.papers.evidence import Evidence, Row
from holdfast.papers.local_gecl.common import final_accuracy, preset_plan, small

GRAPHS, SERVER = "figure-6-graphs", "figure-6-server"
TOPOLOGIES = {"ring": "ring", "double-ring": "double ring", "complete": "fully connected"}
ROUNDS_COMPARED = 10


def same_as_server(where: Circumstances) -> list[Row]:
    """Both forms of the method on the same minibatches in float64: how far apart their models are."""
    changes = small("dtype=float64", f"rounds={ROUNDS_COMPARED}")
    graph = preset_plan(GRAPHS, [*changes, "network.topology=complete"], where)
    server = preset_plan(SERVER, changes, where)
    ours, theirs = graph.simulation(graph.jobs[0]), server.simulation(server.jobs[0])
    rows = []
    for number in range(1, ROUNDS_COMPARED + 1):
        ours.step()
        theirs.step()
        apart = torch.linalg.vector_norm(ours.models - theirs.models) / torch.linalg.vector_norm(
            theirs.models
        )
        rows.append({"round": number, "relative_difference": float(apart)})
    return rows


def overlap(e: Evidence) -> Finding:
    spreads = {}
    for name, in_server in (("local-gecl", "local-gecl-server"), ("d-scaffold", "scaffold")):
        curves = [e.curve(name, GRAPHS, topology=topology) for topology in TOPOLOGIES]
        curves.append(e.curve(in_server, SERVER))
        spreads[name] = float(np.ptp([final_accuracy(curve).mean() for curve in curves]))
    ours = ", ".join(f"{name} {spread:.2f} points" for name, spread in spreads.items())
    if e.full:
        return judged(max(spreads.values()) <= 1.5, ours, "spread of the means at most 1.5 points")
    plain = [e.curve("gossip", GRAPHS, topology=topology) for topology in TOPOLOGIES]
    plain.append(e.curve("fedavg", SERVER))
    of_gossip = float(np.ptp([final_accuracy(curve).mean() for curve in plain]))
    return judged(
        max(spreads.values()) < of_gossip, f"{ours}; gossip {of_gossip:.2f}", "less than Gossip's: the sign"
    )


def identical(e: Evidence) -> Finding:
    worst = max(row["relative_difference"] for row in e.rows)
    return judged(
        worst <= 1e-5, f"models apart by {worst:.0e} (relative, {len(e.rows)} rounds)", "at most 1e-5"
    )


def _lines() -> list[Line]:
    return [
        *(Line(f"Local G-ECL, {w}", "local-gecl", {"topology": t}, GRAPHS) for t, w in TOPOLOGIES.items()),
        Line("Local G-ECL, server", "local-gecl-server", {}, SERVER),
        *(Line(f"D-SCAFFOLD, {w}", "d-scaffold", {"topology": t}, GRAPHS) for t, w in TOPOLOGIES.items()),
        Line("SCAFFOLD, server", "scaffold", {}, SERVER),
    ]


FIGURE_6 = Experiment(
    id="figure-6",
    title="Figs. 5 and 6: ring, double ring, fully connected and server, h = 0.5, K = 64",
    presets=[Preset(GRAPHS, small()), Preset(SERVER, small())],
    compute=same_as_server,
    claims=[
        Claim("The corrected methods end alike on all networks", "curves overlap", overlap),
        Claim(
            "Local G-ECL on the complete graph is Local G-ECL with a server (Prop. 1)",
            "equivalent",
            identical,
        ),
    ],
    layout=Layout(
        [Panel("(a) test accuracy", _lines()), Panel("(b) train loss", _lines(), y="train_loss")], columns=2
    ),
)
