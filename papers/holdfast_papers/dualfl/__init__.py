"""DualFL (D): accelerated rounds for convex objectives, smooth or not, from the dual."""

from __future__ import annotations

from pathlib import Path

from holdfast_papers.base import Paper
from holdfast_papers.dualfl.figure_1_cifar10 import (
    FIGURE_1_CIFAR10,
    FIGURE_1_CIFAR10_CLIENTS,
    FIGURE_1_CIFAR10_RHO,
)
from holdfast_papers.dualfl.figure_1_clients import FIGURE_1_CLIENTS
from holdfast_papers.dualfl.figure_1_methods import FIGURE_1_METHODS
from holdfast_papers.dualfl.figure_1_scaffnew import FIGURE_1_SCAFFNEW
from holdfast_papers.dualfl.table_2 import TABLE_2
from holdfast_papers.dualfl.theory import TABLE_1, THEOREMS

PAPER = Paper(
    id="dualfl",
    title="DualFL: communication acceleration in the general convex regime",
    reference="Park, Xu: DualFL: A Duality-Based Federated Learning Algorithm with Communication "
    "Acceleration in the General Convex Regime (2023)",
    folder=Path(__file__).parent,
    experiments=[
        FIGURE_1_METHODS,
        FIGURE_1_SCAFFNEW,
        FIGURE_1_CLIENTS,
        FIGURE_1_CIFAR10,
        FIGURE_1_CIFAR10_CLIENTS,
        FIGURE_1_CIFAR10_RHO,
        TABLE_2,
        TABLE_1,
        THEOREMS,
    ],
)
