"""From what a user says of nodes and links to the network, and to the data of nodes that attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.data import FederatedData
from holdfast.data.lazy import AnyData
from holdfast.experiments.choices import Named, as_aggregation, as_attack, as_choice
from holdfast.experiments.config import NetworkConfig
from holdfast.robust import Aggregation, Attack
from holdfast.topology import Network, build_network, read_chance
from holdfast.topology.graphs import Graph

Topology = Network | Graph | Named | None
"""Who talks to whom, as ``hf.train`` and ``hf.minimize`` take it."""


def as_network(
    topology: Topology,
    nodes: int,
    seed: int = 0,
    aggregation: Aggregation | Named | None = None,
    attack: Attack | Named | None = None,
) -> Network:
    """The network of ``nodes`` nodes; a random graph that is chosen by name is drawn from ``seed``.

    ``aggregation``, ``attack``: None leaves a ``Network`` as it is.
    """
    network = _as_network(topology, nodes, seed)
    return replace(
        network,
        aggregation=network.aggregation if aggregation is None else as_aggregation(aggregation),
        attack=network.attack if attack is None else as_attack(attack),
    )


def _as_network(topology: Topology, nodes: int, seed: int) -> Network:
    if isinstance(topology, Network):
        return topology
    if topology is None:
        topology = "server"
    if not isinstance(topology, str | Mapping):
        return Network.of(topology)
    return configured_network(NetworkConfig(topology=as_choice("topology", topology)), nodes, seed)


def configured_network(config: NetworkConfig, nodes: int, seed: int) -> Network:
    """The network that an experiment or a federation describes, sporadic if it says so."""
    network = build_network(
        config.topology.name,
        config.topology.parameters,
        config.mixing.name if config.mixing else None,
        config.mixing.parameters if config.mixing else {},
        nodes=nodes,
        seed=seed,
        graph_every=config.graph_every,
    )
    attack = None if config.attack is None else as_attack(config.attack)
    network = replace(network, aggregation=as_aggregation(config.aggregation), attack=attack)
    if (config.compute, config.links, config.redraw_every, config.link_draws) == (None, None, None, "once"):
        return network
    return network.sporadic(
        1.0 if config.compute is None else read_chance("compute", config.compute),
        1.0 if config.links is None else read_chance("links", config.links),
        seed=seed,
        redraw_every=config.redraw_every,
        link_draws=config.link_draws,
    )


def bias_warning(title: str, method: Method, network: Network) -> str | None:
    """What to tell the user of a method whose promises need the plain mean, where there is another rule."""
    if network.aggregation.plain or not method.keeps_sums:
        return None
    return (
        f"{title} reaches the optimum because exchanges keep sums over nodes, and "
        f"{type(network.aggregation).__name__} does not: where data differ, it ends as far away as the rule "
        "is biased (docs/robust.md)"
    )


def poisoned(data: AnyData, attack: Attack | None, classes: int) -> AnyData:
    """``data`` with the class labels that attackers learn from in place of their own."""
    if attack is None or not attack.poisons:
        return data
    if not isinstance(data, FederatedData) or data.y is None or not classes or data.y.ndim != 1:
        raise HoldfastError(
            f"attack {type(attack).__name__}: it changes class labels; give samples as pairs (x, class)"
        )
    lies = torch.as_tensor([owner in attack.nodes for owner in data.owners.tolist()])
    return replace(data, y=torch.where(lies.to(data.y.device), attack.labels(data.y, classes), data.y))
