"""LED: local steps between exchanges of one vector, exact on any constant graph."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.led.theory import THEORY

PAPER = Paper(
    id="led",
    title="Local Exact-Diffusion for Decentralized Optimization and Learning",
    reference="S. A. Alghunaim, 2023, arXiv 2302.00620",
    folder=Path(__file__).parent,
    experiments=[THEORY],
)
