"""NET-FLEET: local steps along a tracker that is corrected recursively, on random graphs."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.net_fleet.comparisons import FIGURE_1, FIGURE_2
from holdfast_papers.net_fleet.schedules import FIGURE_1_CONSTANT, FIGURE_3_HALVED, FIGURE_6_HALVED
from holdfast_papers.net_fleet.sweeps import FIGURE_3, FIGURE_3_ONE_STEP, FIGURE_4, FIGURE_5, FIGURE_6
from holdfast_papers.net_fleet.theory import THEOREM_1

PAPER = Paper(
    id="net-fleet",
    title="NET-FLEET: Achieving Linear Convergence Speedup for Fully Decentralized Federated Learning with "
    "Heterogeneous Data",
    reference="X. Zhang, M. Fang, Z. Liu, H. Yang, J. Liu, Z. Zhu, ACM MobiHoc 2022, "
    "doi.org/10.1145/3492866.3549723",
    folder=Path(__file__).parent,
    experiments=[
        *(FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_3_ONE_STEP, FIGURE_4, FIGURE_5, FIGURE_6),
        *(FIGURE_1_CONSTANT, FIGURE_3_HALVED, FIGURE_6_HALVED),
        THEOREM_1,
    ],
)
