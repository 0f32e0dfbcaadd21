"""Table I: the rate without convexity."""

from __future__ import annotations

from holdfast_papers.base import Claim, Finding, Layout, Line, Panel, PaperExperiment, Preset, judged_by_seeds
from holdfast_papers.evidence import Evidence
from holdfast_papers.fedpd.gaps import CASES, GAP


def summable(e: Evidence) -> Finding:
    """The gaps of the second half add up to less than those of the quarter before.

    So it is where their sum is bounded. A method that stalls adds twice as much, in twice as many rounds, and
    gaps that fall like 1/r add equally much. The sum from the start on would not tell: the first rounds are
    nearly all of it, whatever follows.
    """
    ratios = {}
    for case in CASES:
        path = e.curve("fedpd", heterogeneity=case).path(GAP)
        quarter, half = path.shape[1] // 4, path.shape[1] // 2
        ratios[case] = path[:, half:].sum(1) / path[:, quarter:half].sum(1)
    ours = ", ".join(f"{case} {ratio.max():.1e}" for case, ratio in ratios.items())
    needed = "less than 1: the sum of gaps is bounded, so their mean falls like 1/T (stalled: 2)"
    margins = [1 - ratio for ratio in ratios.values()]
    return judged_by_seeds(
        margins, f"sum over the second half by that over the quarter before: {ours}", needed
    )


TABLE_1 = PaperExperiment(
    id="table-1",
    title="Table I: FedPD's mean gap falls at least like 1/T without convexity",
    presets=[Preset("table-1")],
    claims=[Claim("T times the mean gap over T rounds stays bounded", "O(1/T), Theorem 1", summable)],
    layout=Layout(
        [
            Panel(
                f"{case}ly heterogeneous",
                [Line("FedPD-GD", "fedpd", {"heterogeneity": case})],
                y=GAP,
                y_label="‖∇f‖²",
                log_y=True,
            )
            for case in CASES
        ],
        columns=2,
    ),
)
