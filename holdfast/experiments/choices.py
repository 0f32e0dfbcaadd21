"""What a user chooses: the thing itself, or its name, registered or ``module:attribute``, with parameters.

For the user's own calls and files. A federation file may come from others: it names registered things only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
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
from holdfast.experiments.option_forms import Choice, Named, Topology, as_choice
from holdfast.experiments.spec import NetworkSpec
from holdfast.models import load_model
from holdfast.problem.losses import LOSSES, Loss, LossFunction
from holdfast.problem.losses import as_loss as given_loss
from holdfast.robust import AGGREGATIONS, ATTACKS, Aggregation, Attack
from holdfast.topology import Network, build_network, read_chance

# --- what a user chooses --------------------------------------------------------------------------------


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


def as_loss(loss: Loss | LossFunction | Named) -> Loss:
    """The loss itself, of a function of outputs and targets, or the one that is named."""
    if not isinstance(loss, str | Mapping | Choice):
        return given_loss(loss)
    choice = as_choice("loss", loss)
    name, parameters = choice.name, choice.parameters
    if ":" not in name:
        return LOSSES.build(name, parameters)
    found = import_named("loss", name, "my_module:my_loss")
    if inspect.isfunction(found) and not parameters:
        return given_loss(found)
    return given_loss(make_own("loss", name, parameters, Loss, nn.Module))


def as_function(where: str, function: Any, example: str) -> Any:
    """The function itself, or the one that ``module:function`` names; None stays None."""
    if not isinstance(function, str):
        return function
    found = import_named(where, function, example)
    if not callable(found):
        raise HoldfastError(f"{where} {function!r}: expected a function, got {quoted(found)}")
    return found


def as_channel(channel: Channel | Named) -> Channel:
    """The channel itself, or the one that is named."""
    if isinstance(channel, str | Mapping | Choice):
        choice = as_choice("channel", channel)
        if ":" not in choice.name:
            return CHANNELS.build(choice.name, choice.parameters)
        channel = make_own("channel", choice.name, choice.parameters, Channel)
    given: Channel = check("channel", Channel, channel)
    return given


def as_aggregation(rule: Aggregation | Named) -> Aggregation:
    """The rule itself, or the one that is named."""
    given: Aggregation = check("aggregation", Aggregation, _registered("aggregation", AGGREGATIONS, rule))
    return given


def as_attack(attack: Attack | Named) -> Attack:
    """The attack itself, or the one that is named."""
    given: Attack = check("attack", Attack, _registered("attack", ATTACKS, attack))
    return given


def as_partition(partition: Partitioner | Named | None) -> Partitioner:
    """The rule itself, or the one that is named."""
    rule: Partitioner = _registered("partition", PARTITIONERS, partition)
    return rule


def _registered(where: str, registry: Registry[Any], given: Any) -> Any:
    """What a name, or a table with one, stands for; anything else as it is."""
    if not isinstance(given, str | Mapping | Choice):
        return given
    choice = as_choice(where, given)
    return registry.build(choice.name, choice.parameters)


def as_module(
    model: nn.Module | Named, data: AnyData, classes: int | None, loss: Loss, seed: int
) -> tuple[Callable[[], nn.Module], bool]:
    """What makes the initial model, and whether it can do so on torch's device "meta", without any memory.

    A model that is named is made for samples like ``data`` and drawn from ``seed``.
    """
    if isinstance(model, str | Mapping | Choice):
        choice, outputs = as_choice("model", model), outputs_for(loss, data, classes)
        return partial(initial_module, choice, data.input_shape, outputs, seed), ":" not in choice.name
    if callable(model) and not isinstance(model, nn.Module):
        raise HoldfastError(f"model: expected a module, got {quoted(model)}; call it, model=Net()")
    given: nn.Module = check("model", nn.Module, model)
    return lambda: given, False


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


OF_ANY_NETWORK = {"topology", "aggregation", "attack", "cohort"}  # the other options make one of a name


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
    given = {"topology": topology, "aggregation": aggregation, "attack": attack}
    chosen = {name: value for name, value in given.items() if value is not None}
    return network_of(NetworkSpec.of(chosen), nodes, seed)


def network_of(spec: NetworkSpec, nodes: int, seed: int) -> Network:
    """The network that ``spec`` describes; what stands at its default leaves a ``Network`` as it is."""
    network = _network_of(spec, nodes, seed)
    if "aggregation" in spec.model_fields_set:
        network = replace(network, aggregation=as_aggregation(spec.aggregation or "mean"))
    return network if spec.attack is None else replace(network, attack=as_attack(spec.attack))


def _network_of(spec: NetworkSpec, nodes: int, seed: int) -> Network:
    if not isinstance(spec.topology, Choice):
        default = NetworkSpec()
        for key in NetworkSpec.model_fields:
            if key not in OF_ANY_NETWORK and getattr(spec, key) != getattr(default, key):
                raise HoldfastError(
                    f"{key}: only for a topology by name, such as topology='ring'; of a graph of your own "
                    "make a network, hf.Network.of(graph, mixing).sporadic(...)"
                )
        graph: Any = spec.topology
        return graph if isinstance(graph, Network) else Network.of(graph)
    mixing = None if spec.mixing is None else as_choice("mixing", spec.mixing)
    network = build_network(
        spec.topology.name,
        spec.topology.parameters,
        mixing.name if mixing else None,
        mixing.parameters if mixing else {},
        nodes=nodes,
        seed=seed,
        graph_every=spec.graph_every,
    )
    if (spec.compute, spec.links, spec.redraw_every, spec.link_draws) == (None, None, None, "once"):
        return network
    return network.sporadic(
        1.0 if spec.compute is None else read_chance("compute", spec.compute),
        1.0 if spec.links is None else read_chance("links", spec.links),
        seed=seed,
        redraw_every=spec.redraw_every,
        link_draws=spec.link_draws,
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
