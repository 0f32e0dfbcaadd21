"""Graphs of every kind, and a mixing matrix of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from holdfast.topology import TOPOLOGIES

NODES = 16
PARAMS: dict[str, dict[str, Any]] = {
    "erdos-renyi": {"p": 0.3},
    "random-geometric": {"radius": 0.4},
    "equi-static": {"shifts": 3},
}
GRAPHS = [name for name in TOPOLOGIES if name != "server" and "weights" not in TOPOLOGIES.describe(name)]


def built(name: str, tmp_path: Path, nodes: int = NODES) -> nx.Graph | None:
    params = PARAMS.get(name, {})
    if name == "edge-list":
        file = tmp_path / "links.txt"
        file.write_text("\n".join(f"{node} {node // 2}" for node in range(1, nodes)), encoding="utf-8")
        params = {"path": str(file)}
    return TOPOLOGIES.build(name, params, nodes=nodes, seed=3)


def ring_weights(side: float, nodes: int = 4) -> np.ndarray:
    """The circulant matrix that gives ``side`` to both neighbours on a ring and keeps the rest."""
    shift = np.roll(np.eye(nodes), 1, axis=1)
    return (1 - 2 * side) * np.eye(nodes) + side * (shift + shift.T)
