"""FedPD (E): a primal-dual method for objectives that are not convex, which may skip communication."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.fedpd.femnist import FIGURE_3, FIGURE_3_SKIPPING, FIGURE_4
from holdfast_papers.fedpd.figure_1 import FIGURE_1
from holdfast_papers.fedpd.figure_2 import FIGURE_2
from holdfast_papers.fedpd.table_1 import TABLE_1

PAPER = Paper(
    id="fedpd",
    title="FedPD: adapts to heterogeneous data, and skips communication where data are homogeneous",
    reference="Zhang, Hong, Dhople, Yin, Liu: FedPD: A Federated Learning Framework with Adaptivity to "
    "Non-IID Data (2021)",
    folder=Path(__file__).parent,
    experiments=[FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_3_SKIPPING, FIGURE_4, TABLE_1],
)
