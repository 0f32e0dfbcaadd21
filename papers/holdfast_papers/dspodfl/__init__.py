"""DSpodFL: nodes that compute and links that transmit only now and then, against delays."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.dspodfl.appendix import APPENDIX_P
from holdfast_papers.dspodfl.figures import FIGURE_1, FIGURE_2
from holdfast_papers.dspodfl.theory import THEOREM_4_1

PAPER = Paper(
    id="dspodfl",
    title="Sporadicity in Decentralized Federated Learning: Theory and Algorithm",
    reference="S. Zehtabi, D.-J. Han, R. Parasnis, S. Hosseinalipour, C. Brinton, 2024, arXiv 2402.03448",
    folder=Path(__file__).parent,
    experiments=[FIGURE_1, FIGURE_2, APPENDIX_P, THEOREM_4_1],
)
