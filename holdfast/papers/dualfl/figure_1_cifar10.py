"""Fig. 1 (d) to (f): the same on CIFAR-10, in the first ten rounds."""

from __future__ import annotations

from holdfast.papers.base import Claim, Experiment, Finding, Layout, Line, Preset
from holdfast.papers.dualfl.common import (
    LINES,
    below_all_others,
    error_panel,
    rho_hardly_matters,
    same_rate,
    solved_by,
)
from holdfast.papers.evidence import Evidence

METHODS, CLIENTS, RHO = "figure-1-cifar10", "figure-1-cifar10-clients", "figure-1-cifar10-rho"
COARSE = '{name="lbfgs",tolerance=1e-7}'
FEW_IMAGES = ['problem.partition={name="iid",samples=400}', "problem.nodes=2", "rounds=5"]
DRAWN: dict[str, dict[str, float]] = {
    "fedpd": {"eta": 10},
    "feddualavg": {"lr": 0.003},
    "scaffnew": {"p": 0.003},
    "apda-inexact": {"lr": 100},
    "5gcs": {"lr": 30},
}


def below_in_the_first_rounds(e: Evidence) -> Finding:
    return below_all_others(e, (1, 5, 10) if e.full else (1, 5), METHODS)


FIGURE_1_CIFAR10 = Experiment(
    id="figure-1-cifar10",
    title="Fig. 1 (d) to (f): DualFL and its rivals, more clients, other momenta, CIFAR-10",
    presets=[
        Preset(METHODS, [*FEW_IMAGES, *solved_by(COARSE, "dualfl", "fedpd", "apda-inexact", "5gcs")]),
        Preset(CLIENTS, [*FEW_IMAGES, "problem.nodes=[2,8]", *solved_by(COARSE, "dualfl")]),
        Preset(RHO, [*FEW_IMAGES, "algorithm.rho=[0.0,0.01]", *solved_by(COARSE, "dualfl")]),
    ],
    claims=[
        Claim("DualFL's error is below all others' in the first rounds", "curves", below_in_the_first_rounds),
        Claim(
            "The rate does not deteriorate with the number of clients",
            "does not deteriorate",
            lambda e: same_rate(e, *((8, 64) if e.full else (2, 8)), preset=CLIENTS),
        ),
        Claim(
            "A rho far from the tuned value costs little",
            "not significantly slower",
            lambda e: rho_hardly_matters(e, RHO),
        ),
    ],
    layout=Layout(
        [
            error_panel(
                "(d) methods",
                [
                    line._replace(where=DRAWN.get(line.algorithm, {}), preset=METHODS)
                    for line in LINES
                    if line.algorithm not in ("feddr", "feddyn")
                ],
            ),
            error_panel("(e) clients", [Line("DualFL", "dualfl", {}, CLIENTS)], each="nodes"),
            error_panel("(f) momentum", [Line("DualFL", "dualfl", {}, RHO)], each="rho"),
        ]
    ),
    note="Ten rounds; rivals' settings from short grids, as the paper's are for another scaling (table-2).",
)
