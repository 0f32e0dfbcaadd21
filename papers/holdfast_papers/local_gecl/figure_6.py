"""Figs. 5 and 6: ring, double ring, complete graph and server; and the last two are the same method."""

from __future__ import annotations

import numpy as np
import torch

from holdfast_papers.base import (
    Circumstances,
    Claim,
    Finding,
    Line,
    PaperExperiment,
    Preset,
    judged,
    judged_by_seeds,
)
from holdfast_papers.evidence import Evidence, TableRow, mean_texts
from holdfast_papers.local_gecl.common import accuracy_and_loss, final_accuracy, preset_plan, small, within

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


def accuracies(e: Evidence, on_graphs: str, with_server: str) -> np.ndarray:
    """Final accuracies of a method on all networks, [networks, seeds]."""
    curves = [e.curve(on_graphs, GRAPHS, topology=topology) for topology in TOPOLOGIES]
    return np.array([final_accuracy(curve) for curve in (*curves, e.curve(with_server, SERVER))])


def overlap(e: Evidence) -> Finding:
    ends = [accuracies(e, "local-gecl", "local-gecl-server"), accuracies(e, "d-scaffold", "scaffold")]
    if e.full:
        spreads = [np.ptp(own.mean(1)) for own in ends]
        ours = f"local-gecl {spreads[0]:.2f} points, d-scaffold {spreads[1]:.2f} points"
        margins = [margin for own in ends for margin in within(1.5, *own)]
        return judged_by_seeds(margins, ours, "spread of the means at most 1.5 points")
    local_gecl, d_scaffold, gossip = (np.ptp(own, 0) for own in (*ends, accuracies(e, "gossip", "fedavg")))
    spread = mean_texts({"local-gecl": local_gecl, "d-scaffold": d_scaffold, "gossip": gossip})
    margins = [gossip - local_gecl, gossip - d_scaffold]
    return judged_by_seeds(margins, f"spread in points: {spread}", "less than Gossip's: the sign")


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
