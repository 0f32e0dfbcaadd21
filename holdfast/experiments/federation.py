"""The federation file: what is learned together, by whom, and how they reach one another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, PrivateAttr
from torch import nn

import holdfast
from holdfast.algorithms import ALGORITHMS, Method
from holdfast.channels import CHANNELS, Channel
from holdfast.core.errors import HoldfastError
from holdfast.core.validation import Count, Positive
from holdfast.data.dataset import Finite
from holdfast.engines.common.fit import check_fit, check_unanswered, placed
from holdfast.engines.common.ingredients import MANY, repeating_at_most
from holdfast.engines.deploy.epochs import Epoch
from holdfast.engines.deploy.federation import Federation
from holdfast.engines.deploy.own_model import OwnModel, read_own_model
from holdfast.experiments.choices import initial_module
from holdfast.experiments.config import (
    Choice,
    Chosen,
    ChosenAlgorithm,
    LearningConfig,
    NetworkConfig,
    check_keys,
    read_foreign_toml,
)
from holdfast.experiments.epochs import LocalEpochs
from holdfast.experiments.federation_checks import (
    check_foreign,
    check_membership,
    check_private_length,
    check_reach,
    check_round,
    check_secure_aggregation,
    check_steps,
    check_trust,
)
from holdfast.experiments.networks import configured_network
from holdfast.experiments.protecting import (
    check_private_federation,
    federation_ledger,
    federation_method,
)
from holdfast.experiments.warm_start import digest_of, load_start, read_start
from holdfast.models import load_model
from holdfast.models.base import MODELS
from holdfast.privacy import Ledger, NodeDP
from holdfast.problem.losses import LOSSES, Loss
from holdfast.topology import Network


class CommonProblem(LearningConfig):
    """What is learned, and what the data of every node look like."""

    # Either the shape of one sample, images channels first; or, by name, the shapes of several columns.
    input_shape: list[Count] | None = Field(default=None, min_length=1)
    columns: dict[str, list[Count]] | None = Field(default=None, min_length=1)
    classes: Count | None = None  # None: real targets
    mean: Finite = 0.0  # samples enter the model as (x - mean)/std, uint8 pixels as (x/255 - mean)/std
    std: Positive = 1.0


class FederationFile(Federation):
    """A federation as its file describes it."""

    channel: Chosen = Choice(name="identity")
    start: str = Field(default="", max_length=100)  # a model to start from, in the folder of the command
    problem: CommonProblem
    network: NetworkConfig = NetworkConfig()
    algorithm: ChosenAlgorithm

    _members_digest: str = PrivateAttr(default="")  # of the file and the epoch, where it is not the first

    @property
    def model(self) -> Choice:
        """The model that is trained here."""
        return Choice(name=self._own_model.spec) if self._own_model else self.problem.model

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

    def in_epoch(self, epoch: Epoch) -> Self:
        """The federation with the members of ``epoch``, of which this one is the file; checked."""
        if epoch.number == 0:
            return self
        own = {node.name: node.address for node in self.node}
        where = {node.name: node.address or own.get(node.name, "") for node in epoch.nodes}
        nodes = [{**node.model_dump(), "address": where[node.name]} for node in epoch.nodes]
        changes: dict[str, Any] = {"node": nodes}
        if self.relay is not None:
            there = {*epoch.names, *([self.server.name] if self.server else [])}
            links = [pair for pair in self.relay.links if there.issuperset(pair)]
            changes["relay"] = {**self.relay.model_dump(), "links": links}
        changed = self.of(self.model_dump() | changes)
        changed._own_model, changed._runs_own_model = self._own_model, self._runs_own_model
        changed._epoch, changed._first_round = epoch.number, epoch.first
        changed._members_digest = f"{self.id} {epoch.digest}"
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
        return configured_network(self.network, len(self.node), self.seed)

    @property
    def algorithm_name(self) -> str:
        return self.algorithm.name

    @cached_property
    def method(self) -> Method:
        method = ALGORITHMS.build(self.algorithm.name, self.algorithm.parameters)
        if not method.names_parts and method.least_dim == 1:
            sizes: dict[str, int] | None = {}  # no part of a model is treated apart
        elif (sizes := self.sizes) is None:
            method = method.for_any_model()
        elif method.names_parts:
            method = method.for_model(sizes)
        elif sizes and method.least_dim > (numbers := sum(sizes.values())):
            name = self.algorithm.name
            raise HoldfastError(
                f"{name} needs a model of {method.least_dim:g} numbers or more, got {numbers}"
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
        return LOSSES.build(self.problem.loss.name, self.problem.loss.parameters)

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
        chosen = CHANNELS.build(self.channel.name, self.channel.parameters)
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
        MODELS[self.problem.model.name]  # complains about a name that is not registered
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
            raise HoldfastError("server: the topology 'server' needs a [server] with a name and an address")
        if self.server is not None and not self.member_network.is_server:
            raise HoldfastError(
                f"server: the topology {self.network.topology.name!r} has none; leave [server] out"
            )
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
        if "evaluation" in raw:
            raise HoldfastError("[evaluation]: write evaluate_every and shared_metrics at the top")
        check_keys(raw, FederationFile, "the federation file")
        federation = FederationFile.of(raw)
        federation._own_model = own
        federation.check()
    except HoldfastError as error:
        raise HoldfastError(f"{where}: {error}") from None
    return federation
