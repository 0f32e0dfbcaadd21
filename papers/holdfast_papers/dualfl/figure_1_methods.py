"""Fig. 1 (a): DualFL against six deterministic methods, all of them tuned."""

from __future__ import annotations

from holdfast_papers.base import Claim, Finding, Layout, PaperExperiment, Preset, judged
from holdfast_papers.dualfl.common import (
    DIGITS,
    LINES,
    NEARLY_EXACT,
    below_all_others,
    error_panel,
    last_round,
    lowest_error,
    similar_rates,
    solved_by,
)
from holdfast_papers.evidence import Evidence

PRINTED_RHO = 0.003
# The settings that are drawn, of those that are swept.
DRAWN: dict[str, dict[str, float]] = {
    "dualfl": {"rho": PRINTED_RHO},
    "fedpd": {"eta": 30},
    "feddr": {"eta": 30},
    "feddualavg": {"lr": 0.3},
    "apda-inexact": {"lr": 100},
    "5gcs": {"lr": 30},
}


def below_in_the_first_rounds(e: Evidence) -> Finding:
    # On the small images of the small scale every method is faster, and rivals catch up sooner.
    return below_all_others(e, (1, 5, 10) if e.full else (1, 5))


def below_in_the_end(e: Evidence) -> Finding:
    return below_all_others(e, (last_round(e),))


def as_fast_as_fedpd(e: Evidence) -> Finding:
    return similar_rates(e, ("fedpd", "feddr"))


def as_fast_as_feddyn(e: Evidence) -> Finding:
    ratio = lowest_error(e, "dualfl", 5) / lowest_error(e, "feddyn", 5)
    return judged(ratio <= 1.05, f"{ratio:.2f} times FedDyn's error at round 5", "at most 1.05")


FIGURE_1_METHODS = PaperExperiment(
    id="figure-1-methods",
    title="Fig. 1 (a): DualFL and six rivals, MNIST, 8 clients",
    presets=[
        Preset(
            "figure-1-methods",
            small=[
                *DIGITS,
                "rounds=20",
                *solved_by(NEARLY_EXACT, "dualfl", "fedpd", "feddr", "feddyn", "apda-inexact", "5gcs"),
                "algorithm.feddualavg.lr=[0.3,1.0]",
                "algorithm.apda-inexact.beta=0.05",
            ],
        )
    ],
    claims=[
        Claim("DualFL's error is below all others' in the first rounds", "curves", below_in_the_first_rounds),
        Claim("It is still below all others' in the last round", "consistently lower", below_in_the_end),
        Claim("In the end its rate is like FedPD's and FedDR's", "similar", as_fast_as_fedpd),
        Claim("The early decay is as fast as FedDyn's", "as fast", as_fast_as_feddyn),
    ],
    layout=Layout(
        [
            error_panel(
                "(a) methods, 8 clients",
                [
                    line._replace(where=DRAWN.get(line.algorithm, {}))
                    for line in LINES
                    if line.algorithm != "scaffnew"
                ],
            )
        ],
        columns=1,
    ),
    note="Every method is tuned on this objective, DualFL by its rho, since the step sizes of the paper's "
    "Table 2 are not for it.",
)
