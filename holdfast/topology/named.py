"""Networks by name, as experiment and federation files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.core.validation import parameters
from holdfast.topology.graphs import TOPOLOGIES, Graph
from holdfast.topology.network import Network, server


def build_network(
    topology: str,
    topology_params: Mapping[str, Any],
    mixing: str | None,
    mixing_params: Mapping[str, Any],
    nodes: int,
    seed: int,
    graph_every: int | None = None,
) -> Network:
    """The network an experiment describes by names; without ``mixing``, a graph gets "metropolis".

    ``graph_every``: a random topology is drawn anew every so many rounds.
    """
    if graph_every is not None:
        if not _may_be_redrawn(topology):
            random = [name for name in TOPOLOGIES if _may_be_redrawn(name)]
            raise HoldfastError(
                f"graph_every: topology {topology!r} has nothing to draw anew; choose {' or '.join(random)}"
            )

        def graphs(epoch: int) -> Graph:
            own_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
            return cast(Graph, TOPOLOGIES.build(topology, topology_params, nodes=nodes, seed=own_seed))

        return Network.varying(graphs, graph_every, mixing or "metropolis", **mixing_params)
    graph = TOPOLOGIES.build(topology, topology_params, nodes=nodes, seed=seed)
    if isinstance(graph, Network):
        if mixing is not None or mixing_params:
            raise HoldfastError(
                f"topology {topology!r} has its own weights; leave the mixing out, got {mixing!r}"
            )
        return graph
    if graph is not None:
        return Network.of(cast(Graph, graph), mixing or "metropolis", **mixing_params)
    if mixing is not None or mixing_params:
        raise HoldfastError(f"topology {topology!r} averages everybody; leave the mixing out, got {mixing!r}")
    return server(nodes)


def _may_be_redrawn(topology: str) -> bool:
    """Whether the topology is a random graph; one with weights of its own is not mixed by name."""
    return "seed" in parameters(TOPOLOGIES[topology]) and "weights" not in TOPOLOGIES.describe(topology)
