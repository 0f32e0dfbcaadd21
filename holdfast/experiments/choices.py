"""What a user chooses: the thing itself, or its name, registered or ``module:attribute``, with parameters.

For the user's own calls and files. A federation file may come from others: it names registered things only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from holdfast.algorithms.load import build_algorithm
from holdfast.channels import CHANNELS, Channel
from holdfast.contract import Method
from holdfast.core.errors import HoldfastError
from holdfast.core.registry import Registry, import_named, make_own
from holdfast.core.validation import Count, check, quoted
from holdfast.data import PARTITIONERS, FederatedData, Partitioner
from holdfast.data.lazy import AnyData
from holdfast.experiments.spec import Choice, NetworkConfig
from holdfast.models import load_model
from holdfast.problem.checks import Augment
from holdfast.problem.losses import LOSSES, Loss, LossFunction
from holdfast.problem.losses import as_loss as given_loss
from holdfast.robust import AGGREGATIONS, ATTACKS, Aggregation, Attack
from holdfast.topology import Network, build_network, read_chance
from holdfast.topology.graphs import Graph

# --- what a user chooses --------------------------------------------------------------------------------


Named = str | Mapping[str, Any]
"""A name, or a dictionary with a name and parameters, as in an experiment file."""


def as_choice(where: str, value: Named) -> Choice:
    """``value`` as an experiment file would have it."""
    table = {"name": value} if isinstance(value, str) else dict(value)
    if not isinstance(table.get("name"), str):
        raise HoldfastError(
            f"{where}: expected a name among the keys, such as {{'name': 'torus', 'rows': 2}}, got "
            f"{quoted(value)}"
        )
    return Choice(**table)


def as_method(algorithm: Method | Named) -> Method:
    """The algorithm itself, or the one that is named."""
    if isinstance(algorithm, str | Mapping):
        choice = as_choice("algorithm", algorithm)
        return build_algorithm(choice.name, choice.parameters)
    if not isinstance(algorithm, Method):
        raise HoldfastError(
            f"algorithm: expected one such as holdfast.LocalGECL(lr=0.05), got {quoted(algorithm)}"
        )
    return algorithm


def own_epochs(algorithm: Any) -> tuple[Any, int | None]:
    """``algorithm`` without the ``local_epochs`` that may stand among its parameters, and these."""
    if not isinstance(algorithm, Mapping) or "local_epochs" not in algorithm:
        return algorithm, None
    rest = {key: value for key, value in algorithm.items() if key != "local_epochs"}
    return rest, check("algorithm.local_epochs", Count, algorithm["local_epochs"])


def as_loss(loss: Loss | LossFunction | Named | Choice) -> Loss:
    """The loss itself, of a function of outputs and targets, or the one that is named."""
    if not isinstance(loss, str | Mapping | Choice):
        return given_loss(loss)
    choice = loss if isinstance(loss, Choice) else as_choice("loss", loss)
    name, parameters = choice.name, choice.parameters
    if ":" not in name:
        return LOSSES.build(name, parameters)
    found = import_named("loss", name, "my_module:my_loss")
    if inspect.isfunction(found) and not parameters:
        return given_loss(found)
    return given_loss(make_own("loss", name, parameters, Loss, nn.Module))


def as_augment(augment: Augment | str | None) -> Augment | None:
    """The function itself, or the one that ``module:function`` names."""
    if not isinstance(augment, str):
        return augment
    found: Augment = import_named("augment", augment, "my_module:flip")
    if not callable(found):
        raise HoldfastError(f"augment {augment!r}: expected a function, got {quoted(found)}")
    return found


def as_channel(channel: Channel | Named | Choice) -> Channel:
    """The channel itself, or the one that is named."""
    if isinstance(channel, str | Mapping | Choice):
        choice = channel if isinstance(channel, Choice) else as_choice("channel", channel)
        if ":" not in choice.name:
            return CHANNELS.build(choice.name, choice.parameters)
        channel = make_own("channel", choice.name, choice.parameters, Channel)
    given: Channel = check("channel", Channel, channel)
    return given


def as_aggregation(rule: Aggregation | Named | Choice) -> Aggregation:
    """The rule itself, or the one that is named."""
    built = _registered("aggregation", AGGREGATIONS, rule)
    given: Aggregation = check("aggregation", Aggregation, built)
    return given


def as_attack(attack: Attack | Named | Choice) -> Attack:
    """The attack itself, or the one that is named."""
    given: Attack = check("attack", Attack, _registered("attack", ATTACKS, attack))
    return given


def _registered(where: str, registry: Registry[Any], given: Any) -> Any:
    """What a name, or a table with one, stands for; anything else as it is."""
    if not isinstance(given, str | Mapping | Choice):
        return given
    choice = given if isinstance(given, Choice) else as_choice(where, given)
    return registry.build(choice.name, choice.parameters)


def as_partition(partition: Partitioner | Named) -> Partitioner:
    """The rule itself, or the one that is named."""
    if isinstance(partition, str | Mapping):
        choice = as_choice("partition", partition)
        return PARTITIONERS.build(choice.name, choice.parameters)
    return partition


def as_module(
    model: nn.Module | Named, data: AnyData, classes: int | None, loss: Loss, seed: int
) -> nn.Module:
    """The model itself, or the one that is named, made for samples like ``data`` and drawn from ``seed``."""
    if isinstance(model, str | Mapping):
        outputs = outputs_for(loss, data, classes)
        return initial_module(as_choice("model", model), data.input_shape, outputs, seed)
    if callable(model) and not isinstance(model, nn.Module):
        raise HoldfastError(f"model: expected a module, got {quoted(model)}; call it, model=Net()")
    given: nn.Module = check("model", nn.Module, model)
    return given


def outputs_for(loss: Loss, data: AnyData, classes: int | None) -> int | None:
    """How many outputs a model for ``data`` has; None: it is not known how many classes there are."""
    unknown = classes is None and loss.has_accuracy and not isinstance(data, FederatedData)
    return None if unknown else loss.outputs(classes)


def initial_module(choice: Choice, input_shape: tuple[int, ...], outputs: int | None, seed: int) -> nn.Module:
    """The chosen model as everybody starts from it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return load_model(choice.name, choice.parameters, input_shape, outputs)


# --- from what a user says of nodes and links to the network, and to the data of nodes that attack ------


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
    if network.aggregation.plain or not method.capabilities.needs_exact_sums:
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
    attackers = torch.as_tensor([owner in attack.nodes for owner in data.owners.tolist()])
    return replace(data, y=torch.where(attackers.to(data.y.device), attack.labels(data.y, classes), data.y))
