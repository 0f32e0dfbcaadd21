"""What one member computes and reveals under a federation file, whichever of its fields say so."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.contract.optimizer import LocalOptimizer
from holdfast.engines.common.dry_run import dry_run
from holdfast.engines.common.ingredients import fewest_gradients, repeating_at_most
from holdfast.privacy import DP, NodeDP
from holdfast_deploy.federation_file import FederationFile

MOST_DELTA = 1e-3


def most_delta(federation: FederationFile, budget: DP | NodeDP, name: str | None) -> float:
    """The largest delta that a policy accepts if it names none: 1e-3, and 1 over all that is protected.

    From there on, giving away one of so many samples or nodes at random, whole, would be private.
    """
    counts, own = federation.counts, _own_numbers(federation, name)
    protected = len(counts) if isinstance(budget, NodeDP) else max(counts[i] for i in own)
    return min(MOST_DELTA, 1 / max(protected, 1))


def local_steps(federation: FederationFile, name: str | None) -> tuple[int, int] | None:
    """The fewest and the most local steps of the node ``name`` in a round; of all nodes if it is not one.

    They follow from the method, the node's own entry, epochs over its data, or the time of a round.
    None: the method takes no such steps.
    """
    steps = _all_steps(federation, name)
    if not steps:
        return None
    timed = federation.round is not None and federation.round.budget is not None
    return (1 if timed else min(steps)), max(steps)


def _all_steps(federation: FederationFile, name: str | None) -> list[int]:
    """The local steps of the node ``name``, or of all nodes, without limits of time; [] if there are none."""
    given = vars(federation.method).get("local_steps")
    if given is None:
        return []
    return [given[i] if isinstance(given, tuple) else given for i in _own_numbers(federation, name)]


def fewest_in_messages(federation: FederationFile, name: str | None) -> int:
    """Of how many gradients a message of the node ``name`` is made at least; of any node if it is not one."""
    problem, steps = federation.problem, local_steps(federation, name)
    if federation.method.capabilities.sends_gradients:
        return 1
    if problem.sampling == "poisson" and problem.private is None:  # all but one minibatch may be empty
        return 1
    method, least = federation.method, None if steps is None else steps[0]
    optimizer = vars(method).get("optimizer")
    ends = optimizer.ends if isinstance(optimizer, LocalOptimizer) else None
    if ends is not None and any(ends % count == 1 for count in _all_steps(federation, name)):
        return 1  # in the round in which they end
    return fewest_gradients(method, federation.member_network, least, federation.rounds)


def vectors_per_link(federation: FederationFile) -> float:
    """How many vectors of the model's size a receiver gets in a round, on average.

    It is found by running the method, with few of its local steps, since these send nothing.
    """
    method = repeating_at_most(federation.method, 2)
    return dry_run(method, federation.member_network, federation.network.cohort).vectors_per_link


def gives_gradients_away(federation: FederationFile, name: str | None = None) -> bool:
    """Whether a receiver can read one gradient of a node's data out of its messages.

    It can if the method sends gradients, or models that are one step away from one that all members know.
    """
    return fewest_in_messages(federation, name) <= 1


def as_configured(federation: FederationFile, name: str | None) -> str:
    """How many local steps the node ``name`` takes in a round, in words; "" if the method takes none."""
    steps = local_steps(federation, name)
    if steps is None:
        return "as it is set up"
    fewest, most = steps
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"with {number} local step{'' if most == 1 else 's'} in a round"


def _own_numbers(federation: FederationFile, name: str | None) -> Sequence[int]:
    names = federation.names
    return [names.index(name)] if name in names else range(len(names))
