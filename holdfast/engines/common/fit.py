"""Whether a method, a channel, a network and a cohort go together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from holdfast.contract import IDENTITY, Algorithm, Channel, Method, ServerAlgorithm
from holdfast.contract.channel import Draw, Use
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import has_leaves, leaves, tree_map
from holdfast.core.validation import Cohort, quoted
from holdfast.engines.common.profile import Profile, placed, profile
from holdfast.engines.common.trial import Expected
from holdfast.topology import Network

Cohorts = Sequence[Sequence[int]]
"""The nodes that take part in round 0, 1, ..., as they were recorded; not drawn."""

StepsTaken = Sequence[Sequence[int]]
"""The local steps of every node in round 0, 1, ..., as they were recorded: at most the method's."""

ROUNDING = 1e-9
"""By how much a computed eigenvalue may miss a bound that it meets: an even ring has exactly -1/3."""

REASONS: dict[Use, str] = {
    "graph": "is not made for messages between neighbours: use the topology 'server'",
    "changing graph": "needs links that are the same in every round",
    "server": "is not made for a server: use a graph such as the topology 'ring'",
    "cohort": "needs every client in every round; leave the cohort out",
    "neighbour sums": "cannot give the plain sum over neighbours, which {method} needs here",
    "links": "sends every neighbour the same, and {method} something else over every link",
    "warm start": "makes good later what it does not send at once, and {method} exchanges before its first "
    "round, where nothing is remembered: leave out the warm start",
    "robust rules": "sends what has changed, and adds it to sums of what was sent before: neither another "
    "aggregation than the mean nor an attack fits it",
}

AGAINST_RULES: dict[Use, str] = {
    "graph": "is not made for messages between neighbours",
    "changing graph": "needs links that are the same in every round, so that there are enough; use 'median'",
    "server": "is centred at the receiver's own message, and a server has none; use 'trimmed-mean'",
    "cohort": "needs every client in every round",
    "neighbour sums": "gives no plain sum over neighbours, which {method} needs; choose a method that mixes",
    "links": "puts messages together, and {method} has one for every link; choose a method that mixes",
    "warm start": "is not made for exchanges before the first round",
}


def check_fit(
    method: Method,
    nodes: int,
    network: Network,
    cohort: Cohort | Cohorts,
    channel: Channel = IDENTITY,
    found: Profile | None = None,
) -> Profile:
    """Refuses a method or a channel on a network it is not made for, and cohorts that cannot be drawn.

    A method, an optimiser or a channel that does not keep the contract is refused, too. The result is the
    method's profile: the one ``found`` before, if there is one.
    """
    _check_network(method, nodes, network, cohort)
    found = found or profile(method, network)
    if not channel.transparent or not network.trusting:
        _check_messages(found, cohort, channel)
    return found


def _check_messages(found: Profile, cohort: Cohort | Cohorts, channel: Channel) -> None:
    """Refuses a channel, an aggregation rule or an attack that does not fit the messages."""
    method, network = found.method, found.network
    can = method.capabilities
    uses: set[Use] = set(found.uses) | {"server" if network.is_server else "graph"}
    if network.sequence is not None or network.activity is not None:
        uses.add("changing graph")
    if cohort != "all":
        uses.add("cohort")
    if not network.trusting:
        _check_rule(method, network, cohort, uses)
        uses.add("robust rules")
    if channel.transparent:
        return
    name, channel = type(channel.chosen).__name__, placed(channel, method, network)
    if not channel.serves:
        raise HoldfastError(
            f"channel {name}: its class declares nothing in `serves`, so it fits nothing; "
            f"name there what it is made for, of {', '.join(repr(use) for use in get_args(Use))}"
        )
    for use in get_args(Use):
        if use in uses - channel.serves:
            reason = REASONS[use].format(method=type(method).__name__)
            raise HoldfastError(f"channel {name} {reason}; or choose another channel")
    if can.sends_zeros and not channel.chosen.keeps_zeros:
        raise HoldfastError(
            f"channel {name} makes numbers of zeros, and those that {type(method).__name__} sends stand for "
            "entries that others send; choose another channel, such as 'top-k'"
        )
    check_channel(channel, found)
    if isinstance(method, ServerAlgorithm) and (can.answers or can.compensates):
        sender = channel.init(found.messages[0]) if can.compensates is True else ()
        memory = (channel.init_receiver(found.messages[0]), sender)
        if has_leaves(memory):
            raise HoldfastError(
                f"channel {name} remembers messages, and {type(method).__name__} counts on what arrives of "
                "each; choose another channel, such as 'top-k'"
            )


def check_channel(channel: Channel, found: Profile) -> None:
    """Sends the messages of a trial through ``channel`` and looks at all that it returns."""
    name, leads = type(channel).__name__, isinstance(found.method, ServerAlgorithm)
    expected, network = Expected(found.one.dim), found.network
    for message in found.messages:
        sender, receiver = channel.init(message), channel.init_receiver(message)
        expected.rows(f"{name}.init", "the state", sender)
        expected.rows(f"{name}.init_receiver", "the state", receiver)
        arrived = _through(expected, channel, message, sender)
        later = channel.update(message, arrived, sender)
        expected.alike(f"{name}.update", "the state", later, sender, "init gave")
        if leads:
            mean, receiver = tree_map(lambda t: t[0], (arrived, receiver))
            where, given = f"{name}.gather", channel.gather(mean, receiver, 1.0)
        else:
            mean, where = arrived, f"{name}.average" if network.is_server else f"{name}.combine"
            receive = channel.average if network.is_server else channel.combine
            given = receive(message, arrived, mean, later, receiver)
        seen, kept = expected.pair(
            where, given, "the message as the method sees it, and the receiver's state"
        )
        expected.alike(where, "the message", seen, mean, "it was given")
        expected.alike(where, "the state", kept, receiver, "init_receiver gave")
        if network.is_server and not channel.down.transparent:
            _through(expected, channel.down, tree_map(lambda t: t[:1], message), ())


def _through(expected: Expected, channel: Channel, message: Any, state: Any) -> Any:
    name = type(channel).__name__
    draw = Draw(0, 0, 0, torch.zeros(len(next(leaves(message))), dtype=torch.int64))
    wire = channel.encode(message, state, draw)
    form = "a tensor [m, ...] with one row per sender"
    rows = len(draw.nodes)
    expected.tensors(f"{name}.encode", "the wire", wire, form, lambda t: t.ndim > 1 and len(t) == rows)
    arrived = channel.decode(wire, message)
    expected.alike(f"{name}.decode", "the message", arrived, message, "encode was given")
    return arrived


def check_unanswered(method: Method, where: str) -> None:
    """Refuses a method whose server answers at the end of a round; ``where`` is what cannot do that."""
    if method.capabilities.answers:
        raise HoldfastError(
            f"{type(method).__name__}: its server answers the cohort at the end of a round, and {where} does "
            "not; run it in a simulation, or take SCAFFOLD or FedDyn"
        )


def check_steps(method: Method, nodes: int, steps: StepsTaken | None) -> None:
    """Refuses recorded numbers of local steps that cannot be."""
    if steps is None:
        return
    if "local_steps" not in vars(method):
        raise HoldfastError(f"steps: {type(method).__name__} takes no local_steps, so leave them out")
    if (why := method.capabilities.unequal_steps) is not True:
        raise HoldfastError(f"steps: they have to be the same for all nodes, as {why}")
    for round, own in enumerate(steps):
        if len(own) != nodes or min(own) < 1:
            raise HoldfastError(f"steps: round {round} has {quoted(own)}, expected {nodes} numbers from 1 on")


def _check_rule(method: Method, network: Network, cohort: Cohort | Cohorts, uses: set[Use]) -> None:
    """Refuses a rule that cannot work here, and an attack by nodes that are not there."""
    rule, attack = network.aggregation, network.attack
    if attack is not None:
        if (last := max(attack.nodes)) >= network.nodes:
            raise HoldfastError(
                f"attack.nodes: node {last} is not among the {network.nodes} nodes, from 0 on"
            )
        if len(set(attack.nodes)) >= network.nodes:
            raise HoldfastError("attack.nodes: nobody is left who is honest; name fewer")
        if "links" in uses:
            raise HoldfastError(
                f"attack: {type(method).__name__} sends every neighbour something else, and attacks here "
                "send all the same; choose a method that mixes"
            )
    name = type(rule).__name__
    for use in get_args(Use):
        if use in uses - rule.serves:
            raise HoldfastError(
                f"aggregation {name} {AGAINST_RULES[use].format(method=type(method).__name__)}"
            )
    if network.is_server:
        drawn = network.nodes if cohort == "all" else cohort
        fewest = drawn if isinstance(drawn, int) else min(map(len, drawn))
        who = "the server receives"
    else:
        least = int(network.degrees.argmin())
        fewest, who = int(network.degrees[least]) + 1, f"node {least} has, its own included,"
    if fewest < rule.least:
        raise HoldfastError(
            f"aggregation {name}: it needs at least {rule.least} messages, and {who} {fewest}; allow fewer "
            "attackers, or choose a denser graph"
        )


def _check_network(method: Method, nodes: int, network: Network, cohort: Cohort | Cohorts) -> None:
    name = type(method).__name__
    can = method.capabilities
    leads = isinstance(method, ServerAlgorithm) or can.topology == "server"
    if network.nodes != nodes:
        raise HoldfastError(
            f"network: it has {network.nodes} nodes, but the problem has {nodes}; give both the same number"
        )
    steps = vars(method).get("local_steps")
    if isinstance(steps, tuple) and len(steps) != nodes:
        raise HoldfastError(
            f"{name}.local_steps: a list has one number for each of the {nodes} nodes, got {len(steps)}"
        )
    if leads and not network.is_server:
        raise HoldfastError(f"{name} needs a server: use the topology 'server', not a graph")
    if can.topology == "graph" and network.is_server:
        raise HoldfastError(
            f"{name} works along links: use a graph such as the topology 'ring', not a server"
        )
    if isinstance(method, Algorithm):
        _check_weights(method, network)
    # Recorded cohorts are what they were; some may have lacked clients that were late.
    if isinstance(method, ServerAlgorithm) and isinstance(cohort, int | str):
        _check_least(method, nodes if cohort == "all" else cohort)
    if cohort == "all":
        return
    if not isinstance(method, ServerAlgorithm):
        raise HoldfastError(f"cohort: {name} needs every node in every round; leave the cohort out")
    if not isinstance(cohort, int):
        for round, chosen in enumerate(cohort):
            if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(nodes)):
                raise HoldfastError(
                    f"cohort: round {round} has {quoted(chosen)}, expected different nodes below {nodes}"
                )
        return
    if not 1 <= cohort <= nodes:
        raise HoldfastError(f"cohort: should be between 1 and the number of nodes {nodes}, got {cohort}")


def _check_least(method: ServerAlgorithm[Any], size: int) -> None:
    """Refuses cohorts of fewer clients than the method needs."""
    least = method.capabilities.least_cohort
    if size < least:
        raise HoldfastError(
            f"{type(method).__name__} needs at least {least} clients in every round, and there "
            f"are {size}; take a larger cohort"
        )


def _check_weights(method: Algorithm, network: Network) -> None:
    name = type(method).__name__
    can = method.capabilities
    if can.constant_graph and network.sequence is not None:
        raise HoldfastError(
            f"{name} needs links and weights that are the same in every round, or it may diverge; use a "
            "constant graph, or a method such as KGT, LocalGECL or GTSGD"
        )
    if can.least_eigenvalue > -1 and network.least_eigenvalue < can.least_eigenvalue - ROUNDING:
        raise HoldfastError(
            f"{name} diverges if the mixing matrix has an eigenvalue below {can.least_eigenvalue:.4g}, "
            f"and this one has {network.least_eigenvalue:.4g}; lower its share, or use mixing 'laplacian'"
        )
