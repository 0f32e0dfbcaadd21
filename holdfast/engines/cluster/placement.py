"""Which rank holds which nodes: blocks of nearly equal size, such that few links cross between ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import reverse_cuthill_mckee

from holdfast.core.errors import HoldfastError
from holdfast.topology import Network

Nodes = NDArray[np.int64]


def place(network: Network, ranks: int) -> list[Nodes]:
    """The nodes of every rank, each in ascending order; the same on all ranks.

    The nodes are cut into runs, in the order of their numbers or in that of Cuthill and McKee, which puts
    neighbours next to each other: whichever leaves fewer links between ranks.
    """
    nodes = network.nodes
    if ranks > nodes:
        raise HoldfastError(
            f"{ranks} ranks for {nodes} nodes: every rank holds at least one; start fewer ranks"
        )
    numbered = np.arange(nodes)
    if network.is_server or ranks == 1:
        return np.array_split(numbered, ranks)
    near = np.asarray(reverse_cuthill_mckee(network.adjacency.tocsr(), symmetric_mode=True), dtype=np.int64)
    choices = [[np.sort(part) for part in np.array_split(order, ranks)] for order in (numbered, near)]
    return min(choices, key=lambda blocks: crossing_links(network, blocks))


def owners(blocks: list[Nodes]) -> Nodes:
    """[n]: the rank of every node."""
    ranks = np.empty(sum(map(len, blocks)), dtype=np.int64)
    for rank, block in enumerate(blocks):
        ranks[block] = rank
    return ranks


def crossing_links(network: Network, blocks: list[Nodes]) -> int:
    """How many undirected links have their ends on different ranks."""
    ends = owners(blocks)[network.links()]
    return int((ends[:, 0] != ends[:, 1]).sum())
