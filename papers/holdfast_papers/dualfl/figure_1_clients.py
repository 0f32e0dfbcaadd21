"""Fig. 1 (b): more clients."""

from __future__ import annotations

from holdfast_papers.base import Claim, Layout, Line, PaperExperiment, Preset
from holdfast_papers.dualfl.common import (
    DIGITS,
    NEARLY_EXACT,
    error_panel,
    same_level,
    same_rate,
    solved_by,
)

FEW, MANY = 8, 64


FIGURE_1_CLIENTS = PaperExperiment(
    id="figure-1-clients",
    title="Fig. 1 (b): DualFL with more and more clients, MNIST",
    presets=[
        Preset(
            "figure-1-clients",
            small=[
                *DIGITS,
                "seeds=[0,1,2,3,4]",
                "rounds=20",
                "problem.nodes=[2,8,64]",
                *solved_by(NEARLY_EXACT, "dualfl"),
            ],
        )
    ],
    claims=[
        Claim(
            "The rate does not deteriorate with the number of clients",
            "does not deteriorate",
            lambda e: same_rate(e, FEW, MANY),
        ),
        Claim("Nor does the level of the error", "–", lambda e: same_level(e, FEW, MANY), kind="ours"),
    ],
    layout=Layout([error_panel("clients", [Line("DualFL", "dualfl")], each="nodes")], columns=1),
    note="The paper's numbers of clients are not in its text: powers of two.",
)
