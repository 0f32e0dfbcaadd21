"""Local G-ECL (A): drift corrected by a dual variable on every node, between neighbours or with a server."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.local_gecl.curves import FIGURE_3, FIGURE_4, FIGURE_8
from holdfast_papers.local_gecl.figure_1 import FIGURE_1
from holdfast_papers.local_gecl.figure_6 import FIGURE_6
from holdfast_papers.local_gecl.figure_7 import FIGURE_7
from holdfast_papers.local_gecl.table_3 import TABLE_3, TABLE_3_STEPS
from holdfast_papers.local_gecl.table_4 import TABLE_4

PAPER = Paper(
    id="local-gecl",
    title="Local G-ECL: a primal-dual method that holds on heterogeneous data, with and without a server",
    reference="Tyou, Murata, Fukami, Takezawa, Niwa: A Localized Primal-Dual Method for Centralized/"
    "Decentralized Federated Learning Robust to Data Heterogeneity",
    folder=Path(__file__).parent,
    experiments=[FIGURE_1, TABLE_3, TABLE_3_STEPS, FIGURE_3, FIGURE_4, FIGURE_6, FIGURE_7, FIGURE_8, TABLE_4],
)
