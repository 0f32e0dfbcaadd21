"""Figs. 5 and 6: ring, double ring, complete graph and server; and the last two are the same method."""

from __future__ import annotations

import numpy as np
import torch

from holdfast_papers.base import Circumstances, Claim, Finding, Line, PaperExperiment, Preset, judged
from holdfast_papers.evidence import Evidence, TableRow
from holdfast_papers.local_gecl.common import accuracy_and_loss, final_accuracy, preset_plan, small

GRAPHS, SERVER = "figure-6-graphs", "figure-6-server"
TOPOLOGIES = {"ring": "ring", "double-ring": "double ring", "complete": "fully connected"}
ROUNDS_COMPARED = 10


def same_as_server(where: Circumstances) -> list[TableRow]:
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


def spread(e: Evidence, on_graphs: str, with_server: str) -> float:
    """Between the mean final accuracies of a method on all networks, in points."""
    curves = [e.curve(on_graphs, GRAPHS, topology=topology) for topology in TOPOLOGIES]
    curves.append(e.curve(with_server, SERVER))
    return float(np.ptp([final_accuracy(curve).mean() for curve in curves]))


def overlap(e: Evidence) -> Finding:
    corrected = {"local-gecl": "local-gecl-server", "d-scaffold": "scaffold"}
    spreads = {name: spread(e, name, with_server) for name, with_server in corrected.items()}
    ours = ", ".join(f"{name} {points:.2f} points" for name, points in spreads.items())
    if e.full:
        return judged(max(spreads.values()) <= 1.5, ours, "spread of the means at most 1.5 points")
    of_gossip = spread(e, "gossip", "fedavg")
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


FIGURE_6 = PaperExperiment(
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
    layout=accuracy_and_loss(_lines()),
)
