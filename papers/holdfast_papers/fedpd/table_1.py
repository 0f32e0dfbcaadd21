"""Table I: the rate without convexity."""

from __future__ import annotations

from holdfast_papers.base import Claim, Finding, Layout, Line, Panel, PaperExperiment, Preset, judged_by_seeds
from holdfast_papers.evidence import Evidence
from holdfast_papers.fedpd.gaps import CASES, GAP


def summable(e: Evidence) -> Finding:
    shares = {}
    for case in CASES:
        total = e.curve("fedpd", heterogeneity=case).path(GAP).cumsum(1)
        shares[case] = total[:, -1] / total[:, total.shape[1] // 2]
    ours = ", ".join(f"{case} {share.max():.4f}" for case, share in shares.items())
    needed = "at most 1.01: the sum of gaps is bounded, so their mean falls like 1/T"
    margins = [1.01 - share for share in shares.values()]
    return judged_by_seeds(margins, f"sum over T rounds by that over T/2: {ours}", needed)


TABLE_1 = PaperExperiment(
    id="table-1",
    title="Table I: FedPD's mean gap falls at least like 1/T without convexity",
    presets=[Preset("table-1", ["rounds=200"])],
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
