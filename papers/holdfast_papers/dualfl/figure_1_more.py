"""Fig. 1 (b) and (c): more clients, and other momenta."""

from __future__ import annotations

from holdfast_papers.base import Claim, Finding, Layout, Line, PaperExperiment, Preset, judged
from holdfast_papers.dualfl.common import (
    DIGITS,
    ERROR,
    NEARLY_EXACT,
    error_panel,
    rho_hardly_matters,
    same_level,
    same_rate,
    solved_by,
)
from holdfast_papers.evidence import Evidence

FEW, MANY = 8, 64


FIGURE_1_CLIENTS = PaperExperiment(
    id="figure-1-clients",
    title="Fig. 1 (b): DualFL with more and more clients, MNIST",
    presets=[
        Preset(
            "figure-1-clients",
            small=[*DIGITS, "rounds=15", "problem.nodes=[2,8,64]", *solved_by(NEARLY_EXACT, "dualfl")],
        )
    ],
    claims=[
        Claim(
            "The rate does not deteriorate with the number of clients",
            "does not deteriorate",
            lambda e: same_rate(e, FEW, MANY),
        ),
        Claim("The error after so many rounds does not either", "curves", lambda e: same_level(e, FEW, MANY)),
    ],
    layout=Layout([error_panel("clients", [Line("DualFL", "dualfl")], each="nodes")], columns=1),
    note="The paper's numbers of clients are not in its text: powers of two.",
)


def few_rounds_with_any_rho(e: Evidence) -> Finding:
    goal = 1e-4
    rounds = {
        rho: float(e.curve("dualfl", rho=rho).first("round", ERROR, high=goal).mean())
        for rho in e.swept("rho")
    }
    ours = ", ".join(f"rho {rho}: {needed:.0f}" for rho, needed in rounds.items())
    return judged(
        max(rounds.values()) <= 2 * min(rounds.values()),
        f"rounds to an error of {goal:g}: {ours}",
        "all of them reach it, within a factor of 2",
    )


FIGURE_1_RHO = PaperExperiment(
    id="figure-1-rho",
    title="Fig. 1 (c): DualFL with other momenta, MNIST, 8 clients",
    presets=[Preset("figure-1-rho", small=[*DIGITS, "rounds=20", *solved_by(NEARLY_EXACT, "dualfl")])],
    claims=[
        Claim(
            "A rho far from the tuned value does not cost many rounds",
            "not significantly slower",
            few_rounds_with_any_rho,
        ),
        Claim("Nor does it leave a larger error in the end", "not significantly slower", rho_hardly_matters),
    ],
    layout=Layout([error_panel("momentum", [Line("DualFL", "dualfl")], each="rho")], columns=1),
)
