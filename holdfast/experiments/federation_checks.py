"""Whether the parts of a federation file fit together; complaints say what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.algorithms import ALGORITHMS, ServerAlgorithm
from holdfast.core.errors import HoldfastError
from holdfast.privacy.aggregation.shares import default_threshold

if TYPE_CHECKING:
    from holdfast.experiments.federation import FederationFile

MOST_STEPS = 100_000  # of a node in a round
MOST_PEERS = 1000
MOST_REPEATS = {"exchanges": 1000, "warm_start_rounds": 1000}  # of what else is done over and over
# Of private federations: what is planned is counted step by step, before anything starts.
MOST_PRIVATE_ROUNDS, MOST_PRIVATE_STEPS = 20_000, 200_000
MOST_TEXT = 8 * 2**20  # bytes of a file that the federation file names


def check_reach(federation: FederationFile) -> None:
    """Whether everybody who is asked for something can be: at an address, or through the relay."""
    if federation.relay is not None:
        if not federation.relay.address:
            raise HoldfastError("relay: everybody has to reach it; give its address, host:port")
        known = {member.name for member in federation.members}
        if strangers := sorted({name for pair in federation.relay.links for name in pair} - known):
            raise HoldfastError(f"relay.links: {strangers[0]!r} is not a member")
        return
    for member in [federation.server] if federation.server else federation.node:
        if not member.address:
            raise HoldfastError(
                f"{member.name}: others have to reach it; give its address, host:port, or a [relay]"
            )


def check_round(federation: FederationFile) -> None:
    """Whether some may be late or do less, if the file says so."""
    if federation.round is None:
        return
    method, quorum, deadline = federation.method, federation.round.quorum, federation.round.deadline
    if (quorum is None) != (deadline is None):
        raise HoldfastError("round: quorum and deadline go together; give both, or neither")
    if federation.round.budget is not None:
        if "local_steps" not in vars(method):
            raise HoldfastError(
                f"round.budget: {federation.algorithm.name} takes no local_steps; leave it out"
            )
        if why := method.why_equal_steps:
            raise HoldfastError(f"round.budget: all nodes have to take as many local steps, as {why}")
    if quorum is None or deadline is None:
        return
    if not isinstance(method, ServerAlgorithm) or not method.allows_late:
        why = "needs a message of every node in every round"
        if isinstance(method, ServerAlgorithm) and method.allows_cohorts:
            why = "forgets whoever is late, and leans towards those who never are"
        made: dict[str, Any] = {name: ALGORITHMS[name] for name in ALGORITHMS}
        able = sorted(name for name, method_class in made.items() if method_class.allows_late)
        raise HoldfastError(
            f"round: {federation.algorithm.name} {why}; leave out the quorum, or choose {', '.join(able)}"
        )
    if quorum > federation.cohort:
        raise HoldfastError(f"round.quorum: should be at most the cohort's {federation.cohort}, got {quorum}")
    if deadline >= federation.limits.wait:
        raise HoldfastError("round.deadline: should be less than limits.wait, after which members stop")
    if federation.membership is not None and quorum > federation.membership.minimum:
        raise HoldfastError("round.quorum: should be at most membership.minimum, to which members may go")


def check_steps(federation: FederationFile) -> None:
    """Whether local steps are numbers that can be done; what a round takes is counted step by step."""
    common = federation.algorithm.parameters.get("local_steps", 1)
    if not isinstance(common, int):
        raise HoldfastError("algorithm.local_steps: one number; a node's own stands in its [[node]]")
    own = [("local_steps", node.local_steps) for node in federation.node if node.local_steps]
    for key, times in [*own, *_repeated(federation.algorithm.parameters)]:
        if times > (most := MOST_REPEATS.get(key, MOST_STEPS)):
            raise HoldfastError(f"{key}: at most {most} in a round, got {times:g}")
    if (steps := _local_steps(federation)) > MOST_STEPS:  # of epochs over so many samples
        raise HoldfastError(f"local_steps: at most {MOST_STEPS} in a round, got {steps:g}")


def check_private_length(federation: FederationFile) -> None:
    """Whether what is planned of a private federation can be counted."""
    rounds, steps = federation.rounds, _steps(federation)
    if rounds > MOST_PRIVATE_ROUNDS:
        raise HoldfastError(f"rounds: at most {MOST_PRIVATE_ROUNDS} with problem.private, got {rounds:g}")
    if rounds * steps > MOST_PRIVATE_STEPS:
        raise HoldfastError(
            f"rounds: at most {MOST_PRIVATE_STEPS} steps of a node in all of them with problem.private, got "
            f"{rounds:g} rounds of {steps:g}"
        )


def _local_steps(federation: FederationFile) -> int:
    own = vars(federation.method).get("local_steps", 1)
    return max(own) if isinstance(own, tuple) else int(own)


def _steps(federation: FederationFile) -> int:
    """What a node does one after another in a round, at most."""
    given = _repeated(federation.algorithm.parameters)
    return _local_steps(federation) + sum(times for key, times in given if key != "local_steps")


def _repeated(parameters: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """All numbers of repetitions, also of parts such as a solver."""
    for key, value in parameters.items():
        if isinstance(value, dict):
            yield from _repeated(value)
        elif isinstance(value, int) and (key.endswith("steps") or key in MOST_REPEATS):
            yield key, value


def check_trust(federation: FederationFile) -> None:
    """Whether members can do what the network's rule needs; nobody is asked to attack."""
    network, masked = federation.member_network, federation.secure_aggregation is not None
    if network.attack is not None:
        raise HoldfastError("network.attack: it is for simulations, with 'holdfast run'; leave it out")
    if not network.aggregation.plain and (masked or federation.averages_statistics):
        hidden = "secure aggregation shows sums only" if masked else "statistics are averaged"
        raise HoldfastError(f"network.aggregation: a rule needs single messages, and {hidden}; leave one out")


def check_secure_aggregation(federation: FederationFile) -> None:
    """Whether messages can be added up under masks, if the file says so."""
    if federation.secure_aggregation is None:
        return
    given, cohort = federation.secure_aggregation.threshold, federation.cohort
    threshold, why = given or default_threshold(cohort), ""
    quorum = None if federation.round is None else federation.round.quorum
    if not federation.led:
        why = f"it is for methods that a server leads, and {federation.algorithm.name} is none"
    elif not federation.wire_channel.transparent:
        why = "compressed messages cannot be added up under masks; leave [channel] out"
    elif federation.averages_statistics:
        why = "BatchNorm's statistics are averaged in the open; give buffers = 'local'"
    elif federation.membership is not None:
        why = "members may change, and a cohort of one would hide nothing; leave [membership] out"
    elif cohort < 3:
        why = f"among {cohort} clients a sum hides nothing; it takes 3 or more in every round"
    elif not cohort / 2 < threshold <= cohort:
        why = f"threshold = {threshold} of {cohort} clients; expected more than half"
    elif quorum is not None and quorum < threshold:
        why = f"round.quorum = {quorum} is less than its threshold of {threshold}"
    if why:
        raise HoldfastError(f"secure_aggregation: {why}")


def check_membership(federation: FederationFile) -> None:
    """Whether members may change, if the file says so."""
    if federation.membership is None:
        return
    network, why = federation.member_network, ""
    if "path" in federation.network.topology.parameters:
        why = "the links stand in a file, and there is no rule to build others by"
    elif network.sequence is not None or network.activity is not None:
        why = "links have to be the same in every round"
    elif network.is_server and not federation.led:
        why = f"with a server it needs a method that the server leads; {federation.algorithm.name} is none"
    elif len(federation.node) < federation.membership.minimum:
        why = f"there are {len(federation.node)} nodes, fewer than membership.minimum"
    after = federation.membership.remove_after
    if after is not None and after >= federation.limits.wait:
        raise HoldfastError("membership.remove_after: should be less than limits.wait")
    if why:
        raise HoldfastError(f"membership: members cannot change here: {why}; leave [membership] out")


def check_foreign(federation: FederationFile) -> None:
    """The file may come from others: it must not name code, other folders, or the authority's files."""
    if federation.server is None and len(federation.node) > MOST_PEERS:  # every pair may be a link
        raise HoldfastError(
            f"node: at most {MOST_PEERS} without a server, got {len(federation.node)}; add a [server]"
        )
    if ":" in federation.problem.model.name:
        raise HoldfastError(
            f"problem.model: {federation.problem.model.name!r} names code, which a federation file must not; "
            "choose from 'holdfast list models' there, and give code of your own on the command line of "
            "every site: --model module:Class"
        )
    files = {
        "network.topology": federation.network.topology.parameters.get("path"),
        "start": federation.start or None,
    }
    for key, path in files.items():
        if not isinstance(path, str):
            continue
        if Path(path).name == path:
            _check_file(key, Path(path))
            continue
        raise HoldfastError(
            f"{key}: {path!r} leads to another folder; expected the plain name of a file in "
            "the folder that the command is started in"
        )
    if "ca" in [member.name for member in federation.certified]:
        raise HoldfastError("node: the name 'ca' belongs to the authority's files; choose another")


def _check_file(key: str, path: Path) -> None:
    """Refuses what can be read for ever, or fills the memory; a model to start from may be large."""
    if path.exists() and not path.is_file():
        raise HoldfastError(f"{key}: {path} is no regular file")
    if key != "start" and path.is_file() and path.stat().st_size > MOST_TEXT:
        raise HoldfastError(f"{key}: {path} has {path.stat().st_size} bytes; expected at most {MOST_TEXT}")
