"""The federation file: what is learned together, by whom, and how they reach one another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from pydantic import Field, PrivateAttr
from safetensors import SafetensorError
from torch import Tensor, nn

import holdfast
from holdfast.algorithms import ALGORITHMS, Method, ServerAlgorithm
from holdfast.channels import CHANNELS, Channel
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, Positive
from holdfast.data.dataset import Finite
from holdfast.engines.common.fit import check_fit, check_unanswered
from holdfast.engines.common.ingredients import MANY, repeating_at_most
from holdfast.engines.common.profile import placed
from holdfast.experiments.choices import initial_module, network_of
from holdfast.experiments.experiment_file import check_keys, read_foreign_toml
from holdfast.experiments.methods import LocalEpochs
from holdfast.experiments.option_forms import Choice, GivenChannel, as_choice
from holdfast.experiments.spec import ChosenAlgorithm, NetworkSpec, Objective
from holdfast.models import load_model
from holdfast.models.base import MODELS
from holdfast.privacy import Ledger, NodeDP
from holdfast.privacy.aggregation.arithmetic import default_threshold
from holdfast.problem.losses import LOSSES, Loss
from holdfast.topology import Network
from holdfast_deploy.federation import Federation
from holdfast_deploy.membership.roster import Roster
from holdfast_deploy.own_model import OwnModel, read_own_model
from holdfast_deploy.private_federation import check_private_federation, federation_ledger, federation_method

# --- whether the parts of a federation file fit together; complaints say what to change -----------------


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
        if (why := method.capabilities.unequal_steps) is not True:
            raise HoldfastError(f"round.budget: all nodes have to take as many local steps, as {why}")
    if quorum is None or deadline is None:
        return
    if not method.capabilities.late_clients:
        why = "needs a message of every node in every round"
        if isinstance(method, ServerAlgorithm):
            why = "forgets whoever is late, and leans towards those who never are"
        made: dict[str, Any] = {name: ALGORITHMS[name] for name in ALGORITHMS}
        able = sorted(name for name, method_class in made.items() if method_class.declared.late_clients)
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
    if "path" in federation.topology.parameters:
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
    if ":" in (model := as_choice("problem.model", federation.problem.model).name):
        raise HoldfastError(
            f"problem.model: {model!r} names code, which a federation file must not; "
            "choose from 'holdfast list models' there, and give code of your own on the command line of "
            "every site: --model module:Class"
        )
    files = {
        "network.topology": federation.topology.parameters.get("path"),
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


# --- A federation that starts from a model that was trained before --------------------------------------


def read_start(path: Path) -> dict[str, Tensor]:
    """The tensors of the safetensors file ``path``, by name."""
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise HoldfastError(f"start: {path} cannot be read ({error.strerror or error})") from None
    except SafetensorError:
        raise HoldfastError(f"start: {path} is not a safetensors file, or it is damaged") from None


def digest_of(path: Path) -> str:
    """SHA-256 of the file, as ``sha256sum`` prints it: members agree on it."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise HoldfastError(f"start: {path} cannot be read ({error.strerror})") from None


def load_start(module: nn.Module, path: Path) -> None:
    """Has ``module`` start from the model in ``path``; running statistics may be missing."""
    tensors, own = read_start(path), module.state_dict()
    for name, tensor in tensors.items():
        if name in own and tensor.is_floating_point() != own[name].is_floating_point():
            raise HoldfastError(f"start: {path} does not fit the model: {name!r} is of type {tensor.dtype}")
        if not tensor.isfinite().all():
            raise HoldfastError(f"start: {path}: {name!r} has numbers that are not finite; choose another")
    try:
        missing, unexpected = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # other shapes
        raise HoldfastError(
            f"start: {path} does not fit the model: {str(error).splitlines()[-1].strip()}"
        ) from None
    parameters = {name for name, _ in module.named_parameters()}
    if wrong := [*unexpected, *(name for name in missing if name in parameters)]:
        raise HoldfastError(f"start: {path} is of another model: {wrong[0]!r} is in one of the two only")


# --- the federation file: what is learned together, by whom, and how they reach one another -------------


class CommonProblem(Objective):
    """What is learned, and what the data of every node look like."""

    # Either the shape of one sample, images channels first; or, by name, the shapes of several columns.
    input_shape: list[Count] | None = Field(default=None, min_length=1)
    columns: dict[str, list[Count]] | None = Field(default=None, min_length=1)
    classes: Count | None = None  # None: real targets
    mean: Finite = 0.0  # samples enter the model as (x - mean)/std, uint8 pixels as (x/255 - mean)/std
    std: Positive = 1.0


class FederationFile(Federation):
    """A federation as its file describes it."""

    channel: GivenChannel = Choice(name="identity")
    start: str = Field(default="", max_length=100)  # a model to start from, in the folder of the command
    problem: CommonProblem
    network: NetworkSpec = NetworkSpec()
    algorithm: ChosenAlgorithm

    _members_digest: str = PrivateAttr(default="")  # of the file and the roster, where it is not the first

    @property
    def model(self) -> Choice:
        """The model that is trained here."""
        own = self._own_model
        return as_choice("problem.model", self.problem.model) if own is None else Choice(name=own.spec)

    @property
    def topology(self) -> Choice:
        """Which nodes talk to one another."""
        return as_choice("network.topology", self.network.topology)

    @cached_property
    def agreement(self) -> bytes:
        """All that members must agree on, as one text: what the coordinator signs, and members accept.

        Each site may have its own addresses, relay and limits.
        """
        common = self.model_dump(exclude={"limits", "server", "relay", "node"})
        common["version"] = holdfast.__version__
        common["start"] = "" if self._start_file is None else digest_of(self._start_file)
        common["members"] = [
            [node.name, node.samples, *([node.local_steps] if node.local_steps else [])] for node in self.node
        ]
        if self.server is not None:
            common["server"] = self.server.name
        else:  # a topology may depend on chance, on a library's version, or on a file of each site
            nodes, network = range(len(self.node)), self.member_network
            common["links"] = [sorted(map(int, network.neighbours(i))) for i in nodes]
        return json.dumps(common, sort_keys=True).encode()

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(self.agreement + self._members_digest.encode()).hexdigest()[:32]

    def in_roster(self, roster: Roster) -> Self:
        """The federation with the members of ``roster``, of which this one is the file; checked."""
        if roster.number == 0:
            return self
        own = {node.name: node.address for node in self.node}
        where = {node.name: node.address or own.get(node.name, "") for node in roster.nodes}
        nodes = [{**node.model_dump(), "address": where[node.name]} for node in roster.nodes]
        changes: dict[str, Any] = {"node": nodes}
        if self.relay is not None:
            there = {*roster.names, *([self.server.name] if self.server else [])}
            links = [pair for pair in self.relay.links if there.issuperset(pair)]
            changes["relay"] = {**self.relay.model_dump(), "links": links}
        changed = self.of(self.model_dump() | changes)
        changed._own_model, changed._runs_own_model = self._own_model, self._runs_own_model
        changed._roster_number, changed._first_round = roster.number, roster.first
        changed._members_digest = f"{self.id} {roster.digest}"
        changed.check()
        return changed

    def running(self) -> Self:
        """The same for whoever takes part: the site's own model is run, from the bytes that were hashed."""
        if self._own_model is None or self._runs_own_model:
            return self
        self._own_model.run()
        changed = self.of(self.model_dump())
        changed._own_model, changed._runs_own_model = self._own_model, True
        changed.check()
        return changed

    @cached_property
    def member_network(self) -> Network:
        return network_of(self.network, len(self.node), self.seed)

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @cached_property
    def method(self) -> Method:
        method = ALGORITHMS.build(self.algorithm.name, self.algorithm.parameters)
        if not method.names_parts and method.capabilities.least_dim == 1:
            sizes: dict[str, int] | None = {}  # no part of a model is treated apart
        elif (sizes := self.sizes) is None:
            method = method.for_any_model()
        elif method.names_parts:
            method = method.for_model(sizes)
        elif sizes and method.capabilities.least_dim > (numbers := sum(sizes.values())):
            name = self.algorithm.name
            raise HoldfastError(
                f"{name} needs a model of {method.capabilities.least_dim:g} numbers or more, got {numbers}"
            )
        if any(node.local_steps for node in self.node):
            method = self._with_own_steps(method)
        if (epochs := self.algorithm.local_epochs) is None:
            return method
        if not all(self.counts):
            who = self.names[self.counts.index(0)]
            raise HoldfastError(f"algorithm.local_epochs: say how many samples {who!r} has, samples = ...")
        return LocalEpochs(epochs, self.counts, self.problem.batch_size).of(method)

    @cached_property
    def member_method(self) -> Method:
        return federation_method(self)

    @property
    def trusts_server(self) -> bool:
        """Whether messages are private only when the server has added its noise to them."""
        private = self.problem.private
        return isinstance(private, NodeDP) and private.noise == "server"

    def _with_own_steps(self, method: Method) -> Method:
        """``method`` where nodes take different numbers of local steps."""
        common = vars(method).get("local_steps")
        if not isinstance(common, int):
            name = type(method).__name__
            raise HoldfastError(f"node.local_steps: {name} takes none, so leave it out at all nodes")
        own: dict[str, Any] = {"local_steps": tuple(node.local_steps or common for node in self.node)}
        return replace(method, **own)

    @property
    def loss(self) -> Loss:
        """What is minimised."""
        chosen = as_choice("problem.loss", self.problem.loss)
        return LOSSES.build(chosen.name, chosen.parameters)

    @property
    def _start_file(self) -> Path | None:
        return Path(self.start) if self.start else None

    @cached_property
    def sizes(self) -> dict[str, int] | None:
        """How many numbers each trained parameter has; None: only running the site's own model would tell."""
        if self._own_model is not None and not self._runs_own_model:
            return None
        if self._own_model is not None:  # somebody's code, which may look at its numbers
            module = self._fresh_module()
        else:  # without memory, and without torch's generator, which another thread may be drawing from
            shape, outputs = tuple(self.problem.input_shape or ()), self.loss.outputs(self.problem.classes)
            with torch.device("meta"):
                module = load_model(self.model.name, self.model.parameters, shape, outputs)
        return {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}

    def module(self) -> nn.Module:
        """The model as everybody starts from it."""
        module = self._fresh_module()
        if self._start_file is not None:
            load_start(module, self._start_file)
        return module

    def _fresh_module(self) -> nn.Module:
        if self._own_model is not None:
            assert self._runs_own_model, "whoever makes the model asks for running()"
            self._own_model.run()  # again, in case another source of this name was run meanwhile
        shape, outputs = tuple(self.problem.input_shape or ()), self.loss.outputs(self.problem.classes)
        return initial_module(self.model, shape, outputs, self.seed)

    @cached_property
    def wire_channel(self) -> Channel:
        named = as_choice("channel", self.channel)
        chosen = CHANNELS.build(named.name, named.parameters)
        return placed(chosen, self.method, self.member_network)

    @cached_property
    def protection(self) -> Ledger | None:
        return federation_ledger(self)

    @property
    def averages_statistics(self) -> bool:
        return self.problem.buffers == "average"

    @property
    def cohort(self) -> int:
        return len(self.node) if self.network.cohort == "all" else self.network.cohort

    @property
    def counts(self) -> list[int]:
        """Samples of every node, 0 where the file does not say."""
        return [node.samples or 0 for node in self.node]

    def check(self) -> None:
        """Whether everything fits together; complains about the first thing that does not."""
        check_foreign(self)
        if (self.problem.input_shape is None) == (self.problem.columns is None):
            raise HoldfastError("problem: say what samples look like, by input_shape or by columns, not both")
        names = [member.name for member in self.certified]
        for name in names:
            if names.count(name) > 1:
                raise HoldfastError(f"node: the name {name!r} is taken twice; every member needs its own")
        MODELS[
            as_choice("problem.model", self.problem.model).name
        ]  # complains about a name that is not registered
        _ = self.loss  # complains about its parameters
        if self._own_model is None:
            _ = self.sizes  # complains about a model that cannot be made
        if self._start_file is not None:
            read_start(self._start_file)  # complains about what is no model
        check_steps(self)
        if self.algorithm.curvature == "estimate":
            raise HoldfastError("algorithm.curvature: nobody sees all data here; give mu and L yourself")
        if self.problem.private is not None:
            check_private_length(self)
        check_private_federation(self)
        if self.problem.weights == "samples" and not all(self.counts):
            missing = self.names[self.counts.index(0)]
            raise HoldfastError(f"weights = 'samples': say how many samples {missing!r} has, samples = ...")
        if self.member_network.activity is not None and self.limits.exchange >= self.limits.wait:
            raise HoldfastError("limits.exchange: should be less than limits.wait, after which a node stops")
        check_trust(self)
        check_round(self)
        check_secure_aggregation(self)
        quorum = None if self.round is None else self.round.quorum
        cohort = self.network.cohort if quorum is None else quorum  # or any larger number
        brief = repeating_at_most(self.method, MANY)  # that parts fit does not take all steps
        check_fit(brief, len(self.node), self.member_network, cohort, self.wire_channel)
        check_unanswered(self.method, "a deployed federation")
        if self.member_network.is_server and self.server is None:
            raise HoldfastError(
                "server: the topology 'server' needs a [server] with a name and an address; or choose "
                "another network.topology, such as 'ring'"
            )
        if self.server is not None and not self.member_network.is_server:
            raise HoldfastError(f"server: the topology {self.topology.name!r} has none; leave [server] out")
        check_membership(self)
        check_reach(self)


def read_federation(path: Path, model: str | None = None) -> FederationFile:
    """The checked federation in ``path``; ``model`` is the site's own module:Class instead of the file's.

    Nothing of that is run: who takes part asks for ``running()``.
    """
    own = None if model is None else read_own_model(model)
    return make_federation(read_foreign_toml(path, "the federation file"), str(path), own)


def make_federation(raw: dict[str, Any], where: str, own: OwnModel | None = None) -> FederationFile:
    """The federation that ``raw`` describes, checked; complaints begin with ``where``.

    ``own``: the site's own model.
    """
    try:
        check_keys(raw, FederationFile, "the federation file")
        federation = FederationFile.of(raw)
        federation._own_model = own
        federation.check()
    except HoldfastError as error:
        raise HoldfastError(f"{where}: {error}") from None
    return federation
