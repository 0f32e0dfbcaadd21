"""Fig. 7: duals that start at mixed gradients instead of zero."""

from __future__ import annotations

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
from holdfast_papers.evidence import Evidence, TableRow, mean_text, mean_texts
from holdfast_papers.local_gecl.common import (
    accuracy_and_loss,
    ahead,
    final_accuracy,
    preset_plan,
    small,
    within,
)

WARM, COLD = "warm start", "no warm start"
LINES = [
    Line("Local G-ECL, warm start", WARM),
    Line("Local G-ECL, no warm start", COLD),
    Line("Gossip", "gossip"),
]


def initial_bias(where: Circumstances) -> list[TableRow]:
    """E0 = (1/n) sum_i ||dual_i - (grad f_i - grad f)||^2 at the initial model, for both starts."""
    plan = preset_plan("figure-7", small("dtype=float64", "seeds=[0]"), where)
    rows = []
    for job in plan.jobs[:2]:
        simulation = plan.simulation(job)
        nodes = torch.arange(simulation.network.nodes, device=simulation.models.device)
        gradients = simulation.problem.full_grads(simulation.models.detach(), nodes)
        dual = simulation.method.dual(simulation.state)
        assert dual is not None
        error = (dual - (gradients - gradients.mean(0))).square().sum(-1).mean()
        rows.append(
            {"start": job.label, "error": float(error), "spectral_lambda": simulation.network.spectral_lambda}
        )
    return rows


def same_end(e: Evidence) -> Finding:
    gap = final_accuracy(e.curve(WARM)) - final_accuracy(e.curve(COLD))
    return judged_by_seeds(within(1.5, gap, 0 * gap), f"{mean_text(gap)} points", "mean within 1.5 points")


def both_above_gossip(e: Evidence) -> Finding:
    gossip = final_accuracy(e.curve("gossip"))
    gaps = {label: final_accuracy(e.curve(label)) - gossip for label in (WARM, COLD)}
    weakest = min(gaps.values(), key=lambda gap: float(gap.mean()))
    return ahead(e, weakest, 3, f"{mean_texts(gaps)} points")


def bias_shrinks(e: Evidence) -> Finding:
    warm, cold = e.rows
    bound = warm["spectral_lambda"] ** (2 * 10)  # ten rounds of mixing
    ratio = warm["error"] / cold["error"]
    return judged(ratio <= bound, f"ratio {ratio:.2e}, bound {bound:.2e}", "at most lambda^20 for ten rounds")


FIGURE_7 = PaperExperiment(
    id="figure-7",
    title="Fig. 7: with and without warm start, ring, h = 0.5, K = 64",
    presets=[Preset("figure-7", small("evaluate_every=10"))],
    compute=initial_bias,
    claims=[
        Claim("A warm start makes no difference in the end", "slight, early differences", same_end),
        Claim("Both starts end well above Gossip", "curves", both_above_gossip),
        Claim(
            "Mixing the initial gradients removes the bias of the start at the rate of the network",
            "footnote 4",
            bias_shrinks,
        ),
    ],
    layout=accuracy_and_loss(LINES),
)
