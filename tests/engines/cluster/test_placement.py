"""Which nodes a rank holds: all of them once, evenly, and so that few links cross."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from cluster_ranks import random_graph

import holdfast as hf
from holdfast.core.errors import HoldfastError
from holdfast.engines.cluster.exchange import crossing_links, place
from holdfast.topology import Network, server


def test_blocks_cover_all_nodes_once_and_differ_by_one() -> None:
    for network in (Network.of(hf.ring(11)), Network.of(random_graph(11)), server(11)):
        for ranks in (1, 2, 3, 11):
            blocks = place(network, ranks)
            assert np.sort(np.concatenate(blocks)).tolist() == list(range(11))
            assert all((np.diff(block) > 0).all() for block in blocks)
            assert {len(block) for block in blocks} <= {11 // ranks, -(-11 // ranks)}


def test_few_links_cross() -> None:
    assert crossing_links(Network.of(hf.ring(100)), place(Network.of(hf.ring(100)), 4)) == 4
    shuffled = np.random.default_rng(0).permutation(100)
    ring = Network.of(nx.relabel_nodes(hf.ring(100), dict(enumerate(shuffled.tolist()))))
    assert crossing_links(ring, place(ring, 4)) <= 8


def test_more_ranks_than_nodes_are_refused() -> None:
    with pytest.raises(HoldfastError, match="4 ranks for 3 nodes"):
        place(server(3), 4)
