"""A model with BatchNorm for the nodes of ``federation_runs``."""

from __future__ import annotations

from federation_runs import CLASSES, SHAPE
from torch import nn


class Net(nn.Sequential):
    """Statistics of five numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(SHAPE, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))
