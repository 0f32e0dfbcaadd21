"""Base-(k+1) graphs: exact averages after finitely many rounds, for any number of nodes and any degree."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.base_graphs.graphs import CONSENSUS, LEARNING

PAPER = Paper(
    id="base-graphs",
    title="Beyond Exponential Graph: Communication-Efficient Topologies for Decentralized Learning via "
    "Finite-time Convergence",
    reference="Y. Takezawa, R. Sato, H. Bao, K. Niwa, M. Yamada, NeurIPS 2023, arXiv 2305.11420",
    folder=Path(__file__).parent,
    experiments=[CONSENSUS, LEARNING],
)
