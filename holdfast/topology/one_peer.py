"""Exponential and EquiTopo graphs with one neighbour a round, and EquiTopo's constant one.

In print most of these send along one direction only. Links here carry messages both ways, so these are the
undirected forms.
"""

from __future__ import annotations

from math import gcd
from typing import Annotated

import networkx as nx
import numpy as np
from pydantic import Field
from scipy.sparse import csr_array

from holdfast.core.validation import Count, Seed
from holdfast.topology.base_graph import weights_of
from holdfast.topology.graphs import MAX_DRAWS, TOPOLOGIES, TwoOrMore
from holdfast.topology.network import Network


@TOPOLOGIES.register_checked("one-peer-exponential", weights="own")
def one_peer_exponential(nodes: TwoOrMore) -> Network:
    """Pairs of nodes 1, then 2, 4, 8, ... apart average: exact after one period if n is a power of two."""
    shifts = [2**k for k in range((nodes - 1).bit_length())]
    return Network.varying([_pairs(nodes, shift, start=0) for shift in shifts])


@TOPOLOGIES.register_checked("equi-dynamic", weights="own")
def equi_dynamic(nodes: TwoOrMore, seed: Seed) -> Network:
    """Pairs of nodes a random number apart average, drawn anew in every round (OU-EquiDyn, Song 2022)."""

    def drawn(round: int) -> csr_array:
        rng = np.random.default_rng((seed, round))
        return _pairs(nodes, int(rng.integers(1, nodes)), int(rng.integers(nodes)))

    return Network.varying(drawn)


Shifts = Annotated[Count, Field(le=1000)]


@TOPOLOGIES.register_checked("equi-static", weights="own")
def equi_static(nodes: TwoOrMore, shifts: Shifts, seed: Seed) -> Network:
    """Each node has the links i ± u for random u, `shifts` of them (U-EquiStatic, Song et al. 2022).

    W = 1/n on the diagonal, and the rest is shared by the links; drawn again until connected.
    """
    rng = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        drawn = rng.integers(1, nodes, shifts)
        if gcd(nodes, *drawn.tolist()) == 1:
            break
    else:
        drawn = np.append(drawn[1:], 1)  # a single shift of many nodes: the ring
    weight = (1 - 1 / nodes) / (2 * shifts)
    links = [(i, int((i + u) % nodes), weight) for u in drawn for i in range(nodes)]
    W = weights_of(links, nodes)
    W.sum_duplicates()
    graph = nx.empty_graph(nodes)
    graph.add_edges_from((i, j) for i, j, _ in links)
    return Network.of(graph, W)


def _pairs(nodes: int, shift: int, start: int) -> csr_array:
    """Along every cycle i -> i + shift: start is paired with start + shift, the next with the one after."""
    cycles, length = gcd(nodes, shift), nodes // gcd(nodes, shift)
    links = [
        ((start + cycle + k * shift) % nodes, (start + cycle + (k + 1) * shift) % nodes, 0.5)
        for cycle in range(cycles)
        for k in range(0, length - 1, 2)
    ]
    return weights_of(links, nodes)
