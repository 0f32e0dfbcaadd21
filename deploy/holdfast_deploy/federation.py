"""What the members of a federation agree on, as the engine sees it: plain data, and a method and a network.

The file that describes a federation, and what is built from it, are ``holdfast_deploy.federation_file``'s.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import networkx as nx
import torch
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr

from holdfast.contract import Channel, Method, ServerAlgorithm
from holdfast.core.errors import unknown
from holdfast.core.validation import Count, Positive, Section, Seed, Whole
from holdfast.engines.common.ingredients import MANY, repeating_at_most
from holdfast.engines.common.profile import Profile, profile
from holdfast.privacy import Ledger
from holdfast.topology import Network
from holdfast_deploy.own_model import OwnModel

SLOWEST = 2**17  # bytes per second below which a line is too slow for a message
LONGEST_ADDRESS = 300  # characters: a host's name has at most 253
MOST_SAMPLES = 2**40
MOST_NODES = 10_000

NodeMetric = Literal["local_loss", "test_accuracy", "test_loss"]


def _with_a_port(address: str) -> str:
    if address and int(address.rpartition(":")[2]) > 65535:
        raise ValueError("ports go up to 65535")
    return address


class MemberConfig(Section):
    """Somebody who takes part; ``name`` is what the certificate says."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    address: Annotated[
        str,
        Field(max_length=LONGEST_ADDRESS, pattern=r"^$|^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$"),
        AfterValidator(_with_a_port),
    ] = ""


class LimitsConfig(Section):
    """Each site may have its own."""

    wait: Positive = 3600.0  # seconds that a neighbour is waited for before the node stops, to be resumed
    exchange: Positive = 60.0  # seconds after which a sporadic link counts as inactive
    message_mib: Positive = 8192.0  # the largest message that is accepted
    snapshot_every: Count = 10  # rounds between states that are kept, to roll back to
    snapshots: Whole = 3  # how many of these are kept; 0: none
    outlier: Positive = 1e6  # how many times larger in norm than all before a message may be

    def patience(self, size: int) -> float:
        """Seconds in which a message of ``size`` bytes has to be here: to be sent, and to travel."""
        return self.wait + size / SLOWEST


def _no_channel(compression: Any) -> Any:
    if compression == "fp16":
        raise ValueError("'fp16' has become a channel: write channel = \"half\" instead")
    return compression


class NodeConfig(MemberConfig):
    """A node with data of its own. Behind a server it needs no address: it dials out."""

    # How many it has; needed by weights = "samples".
    samples: Annotated[Count, Field(le=MOST_SAMPLES)] | None = None
    local_steps: Count | None = None  # in a round; None: as many as the algorithm's


UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(given: Any) -> Any:
    """``"10min"`` and the like in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)", given) if isinstance(given, str) else None
    if isinstance(given, str) and match is None:
        raise ValueError("expected seconds, or such as '90s', '10min', '2h', '1d'")
    return float(match[1]) * UNITS[match[2]] if match else given


class MembershipConfig(Section):
    """That members may change while the federation runs, see ``Roster``; all agree on it."""

    # Seconds after which members go on without one that they do not hear of; None: only if they are told to.
    # Within a second, members that are there would be left out in the time that a question takes.
    remove_after: Annotated[Annotated[Positive, Field(ge=1)] | None, BeforeValidator(_seconds)] = None
    minimum: Count = 2  # nodes; with fewer they do not go on
    rejoin: bool = False  # whether who was left out so may come back by itself, also with an empty folder


class RoundConfig(Section):
    """How long a round may take; all agree on it."""

    # Whether a server that leads goes on without those who are late: seconds of a round that everybody has,
    # and answers without which it never goes on.
    deadline: Annotated[Positive | None, BeforeValidator(_seconds)] = None
    quorum: Count | None = None
    # Seconds in which a node takes as many of its local steps as fit, see ``Pace``; None: all of them.
    budget: Annotated[Positive | None, BeforeValidator(_seconds)] = None


class SecureAggregationConfig(Section):
    """That a server which leads learns only the sum of its clients' messages; all agree on it."""

    # Clients of a round without whom nothing is revealed: more than half; None: two thirds and one.
    threshold: Count | None = None


class RelayConfig(MemberConfig):
    """Through which members talk that cannot dial one another. It passes on what it cannot read."""

    # Pairs that talk through it. So does everybody with a node that has no address.
    links: list[Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(default=[])


class Federation(Section, ABC):
    """What the members agree on, and where they are. Who describes it also builds its method and network."""

    moved: ClassVar[Mapping[str, str]] = {
        "evaluation": "[evaluation]: write evaluate_every and shared_metrics at the top"
    }

    name: str = Field(default="federation", pattern=r"^[A-Za-z0-9._-]+$", max_length=50)
    rounds: Annotated[Count, Field(lt=2**30)]
    seed: Seed = 0
    dtype: Literal["float32", "float64"] = "float32"
    compression: Annotated[Literal["none", "lossless"], BeforeValidator(_no_channel)] = "none"
    # Public key of whoever signs for all: this file, changes of members, revocations (keys.py).
    coordinator: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    evaluate_every: Count = 1  # rounds between measurements at home
    shared_metrics: list[NodeMetric] = Field(default=[])  # what of those others may see
    limits: LimitsConfig = LimitsConfig()
    round: RoundConfig | None = None  # None: the whole cohort is waited for
    secure_aggregation: SecureAggregationConfig | None = None  # None: the server sees every message
    membership: MembershipConfig | None = None  # None: the members are those of the file, for good
    server: MemberConfig | None = None
    relay: RelayConfig | None = None
    node: list[NodeConfig] = Field(min_length=1, max_length=MOST_NODES)

    _roster_number: int = PrivateAttr(default=0)  # its number, see ``Roster``
    _first_round: int = PrivateAttr(default=0)
    _own_model: OwnModel | None = PrivateAttr(default=None)  # from the command line: no file can set it
    _runs_own_model: bool = PrivateAttr(default=False)  # False: only looked at, for whoever has to agree

    @property
    @abstractmethod
    def id(self) -> str:
        """Identifies the federation: a digest of all that members must agree on, in every message."""

    @abstractmethod
    def in_roster(self, roster: Any) -> Self:
        """The same with the members of a ``Roster``; this one is that of the file."""

    @property
    @abstractmethod
    def member_network(self) -> Network:
        """Who talks to whom, and with which weights."""

    @property
    @abstractmethod
    def algorithm_name(self) -> str:
        """What the algorithm is called in records and reports."""

    @property
    @abstractmethod
    def method(self) -> Method:
        """The algorithm, its hyperparameters checked."""

    @property
    @abstractmethod
    def member_method(self) -> Method:
        """The method as members run it: where whole nodes are private, with clipped and noised messages.

        The noise is from the seed; a member that draws its own puts that in its place.
        """

    @cached_property
    def profile(self) -> Profile:
        """What members send and keep, found with few local steps: it does not depend on how many."""
        return profile(repeating_at_most(self.member_method, MANY), self.member_network)

    @cached_property
    def diameter(self) -> int:
        """Hops between the two nodes that are farthest apart, over the links of all rounds."""
        network = self.member_network
        changing = range(self.rounds) if network.sequence is not None else range(1)
        links = (tuple(link) for r in changing for link in network.at(r).links().tolist())
        graph: nx.Graph[int] = nx.Graph(links)
        graph.add_nodes_from(range(network.nodes))
        return int(nx.diameter(graph))

    @property
    def secret_cohorts(self) -> bool:
        """Whether only the server knows who takes part in a round; it tells each client of itself."""
        method = self.member_method
        drawn = method.capabilities.poisson_cohorts
        return drawn and self.cohort < len(self.node)

    @property
    @abstractmethod
    def wire_channel(self) -> Channel:
        """What messages travel through."""

    @property
    @abstractmethod
    def cohort(self) -> int:
        """Clients that take part in a round."""

    @property
    @abstractmethod
    def protection(self) -> Ledger | None:
        """The privacy budget and the noise with which all rounds stay within it; None: there is none."""

    @property
    @abstractmethod
    def averages_statistics(self) -> bool:
        """Whether models end with BatchNorm's statistics averaged over all nodes, or each with its own."""

    @property
    def roster_number(self) -> int:
        """The number of the roster whose members these are; 0: those of the file."""
        return self._roster_number

    @property
    def first_round(self) -> int:
        """Rounds that were done before these members began."""
        return self._first_round

    @property
    def led(self) -> bool:
        """Whether a server holds the model; else nodes do."""
        return isinstance(self.method, ServerAlgorithm)

    @property
    def last_message_round(self) -> int:
        """That of the final messages. Message round r is round r; then statistics are averaged, if at all."""
        return self.rounds + (2 if self.averages_statistics else 1)

    @property
    def own_model(self) -> OwnModel | None:
        """This site's own model, which replaces the file's; None if the file's is used."""
        return self._own_model

    @property
    def model_identity(self) -> str:
        """What members compare about the model, beyond the file: their own code's hash, or nothing."""
        return self._own_model.identity if self._own_model else ""

    @cached_property
    def names(self) -> list[str]:
        """The nodes' names; a node's number is its place."""
        return [node.name for node in self.node]

    @property
    def members(self) -> list[MemberConfig]:
        """All nodes, and the server if there is one."""
        return [*self.node, *([self.server] if self.server else [])]

    @property
    def certified(self) -> list[MemberConfig]:
        """Everybody who needs a certificate: the members, and the relay if there is one."""
        return [*self.members, *([self.relay] if self.relay else [])]

    def relayed(self, asker: str, peer: str) -> bool:
        """Whether ``asker`` reaches ``peer`` through the relay."""
        if self.relay is None:
            return False
        return not self.member(peer).address or {asker, peer} in map(set, self.relay.links)

    def listens(self, name: str) -> bool:
        """Whether others can ask the member: a client has no port, it only asks and submits."""
        return self.server is None or self.server.name == name

    def member(self, name: str) -> MemberConfig:
        """The member called ``name``."""
        for member in self.members:
            if member.name == name:
                return member
        raise unknown("name in the federation", name, [member.name for member in self.members])

    @property
    def torch_dtype(self) -> torch.dtype:
        """The number type of all vectors."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype
