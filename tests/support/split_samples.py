"""1200 samples of ten classes and of thirty owners, to be split among nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.data import FederatedData, Partitioner, partition

N, CLASSES = 1200, 10
X = np.arange(N, dtype=np.float64)[:, None]  # a sample is its own row number
Y = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), N // CLASSES))
GROUPS = np.random.default_rng(1).permutation(np.repeat(np.arange(30) * 7, N // 30))


def split(how: Partitioner, nodes: int = 10, seed: int = 0, y: Any = Y) -> FederatedData:
    return partition(X, y, how, nodes, seed, groups=GROUPS)
