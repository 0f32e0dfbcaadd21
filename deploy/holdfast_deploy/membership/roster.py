"""Who takes part from which round on: members may change while a federation runs, one roster after another.

Roster 0 is that of the federation file. Each later one has other members, begins after a round, its border,
and is a federation of its own: its digest stands in every message, so that no message of one roster is taken
for one of another. The graph is built again by the rule of the file, and the method starts again with
``init`` from the members' models at the border.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from holdfast.core.errors import HoldfastError
from holdfast.topology import Network
from holdfast_deploy.federation import Federation, MembershipConfig, NodeConfig
from holdfast_deploy.keys import Signature
from holdfast_deploy.storage.messages import Incarnations, Number


class RosterChanged(Exception):  # noqa: N818 - not an error
    """The members have agreed on another roster: the member continues in that one."""


class Checked(BaseModel):
    """What others say: checked, and never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Order(Checked):
    """What the coordinator wants changed. It counts in one roster only, so it cannot be carried out twice.

    Of several for one roster, the one with the highest ``number`` counts: one that cannot be carried out,
    since another member is away, must not stand in the way of the next.
    """

    federation: str = Field(max_length=64)  # the digest of the file
    roster: Number  # of the roster that it ends
    change: Literal["remove", "add", "replace", "rollback"]
    node: NodeConfig | None = None  # the one it is about, unless all members are to go back
    also: list[str] = Field(default=[], max_length=10_000)  # those that are removed with it
    to: Number | None = None  # the round whose models all go back to
    number: Number = 0
    signature: Signature | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.node is None) != (self.change == "rollback") or (self.to is None) != (self.node is not None):
            raise ValueError("'rollback' has a round, every other order a node")
        if self.also and self.change != "remove":
            raise ValueError("only 'remove' is about several nodes")
        return self

    @property
    def name(self) -> str:
        """The member that it is about; "" if that is all of them."""
        return "" if self.node is None else self.node.name

    @property
    def removed(self) -> set[str]:
        """The members that the others continue without."""
        return {self.name, *self.also} if self.change == "remove" else set()

    @property
    def summary(self) -> str:
        """For people."""
        about = ", ".join([self.name, *self.also]) if self.to is None else f"to round {self.to}"
        return f"{self.change} {about}"

    def counts_before(self, other: Order | None) -> bool:
        """Whether this one counts, and not ``other``, if both are for one roster. Of equals, all take one."""
        return other is None or (-self.number, self.document) < (-other.number, other.document)

    @property
    def newcomer(self) -> NodeConfig | None:
        """Who begins with an empty folder, if anybody."""
        return self.node if self.change in ("add", "replace") else None

    @property
    def document(self) -> bytes:
        """What is signed."""
        return self.model_copy(update={"signature": None}).model_dump_json().encode()


class Roster(Checked):
    """A set of members, and the round that they begin with."""

    number: Number
    first: Number  # rounds that were done before it
    # One without an address here is where each site's own file says.
    nodes: list[NodeConfig] = Field(min_length=1, max_length=10_000)
    joined: list[str] = []  # of these, those that start from the model of another, see ``donor``
    incarnations: Incarnations = {}  # of those that were heard of; the others begin with new folders
    order: Order | None = None  # by which it was made; None: members continue without lost ones

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes]

    @property
    def digest(self) -> str:
        """Of all that members must agree on; addresses may differ from site to site."""
        members = [node.model_copy(update={"address": ""}) for node in self.nodes]
        text = self.model_copy(update={"nodes": members, "order": None}).model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()

    def donor(self, name: str, network: Network) -> str:
        """Whose model ``name`` starts from: its own, or where it joins, its first neighbour's that stays.

        Where no neighbour stays, it is that of the first member that does.
        """
        names = self.names
        if name not in self.joined:
            return name
        near: list[str] = [names[int(j)] for j in network.neighbours(names.index(name))]
        return next(other for other in [*near, *names] if other not in self.joined)


class AvailableModels(Checked):
    """Which folder a member continues from, and after which rounds it has its model there, if any."""

    incarnation: str = Field(pattern="^[0-9a-f]{16}$")
    oldest: Number | None = None  # from here to ``newest``, without gaps
    newest: Number | None = None
    earlier: list[Number] = Field(default=[], max_length=1000)  # and these, kept to go back to

    def has(self, round: int) -> bool:
        """Whether it has its model after that round; what others claim may be any number of rounds."""
        if self.oldest is None or self.newest is None:
            return False
        return self.oldest <= round <= self.newest or round in self.earlier


def roster_folder(folder: Path, number: int) -> Path:
    """Where a member, in its ``folder``, keeps what it needs in the roster of that number."""
    return folder / f"roster-{number}" if number else folder


def first_roster(federation: Federation) -> Roster:
    """The members of the file."""
    nodes = [node.model_copy(update={"address": ""}) for node in federation.node]
    return Roster(number=0, first=0, nodes=nodes)


def next_roster(
    now: Roster,
    available: Mapping[str, AvailableModels],
    lost: Collection[str],
    order: Order | None,
    returning: Sequence[NodeConfig] = (),
) -> Roster | None:
    """What follows ``now`` without the ``lost`` ones, with those who are back, and with what is ordered.

    ``available``: of those who were heard of. The border is the last round that all who stay have finished,
    or the one that they are ordered to go back to.
    The result is None where no member that stays has a model, or where one that stays was not heard of yet:
    only it knows how far it is.
    """
    removed = set() if order is None else order.removed
    newcomers = [] if order is None or order.newcomer is None else [order.newcomer]
    newcomers += [node for node in returning if order is None or node.name != order.name]
    fresh = {node.name for node in newcomers}
    staying = [node for node in now.nodes if node.name not in removed | fresh | set(lost)]
    if any(node.name not in available for node in staying):
        return None
    known = {node.name: available[node.name] for node in staying}
    if not (newest := [its.newest for its in known.values() if its.newest is not None]):
        return None
    first = min(newest) if order is None or order.to is None else order.to
    fresh |= {name for name, its in known.items() if not its.has(first)}
    places = {name: i for i, name in enumerate(now.names)}  # a member that is replaced keeps its own
    nodes = sorted([*staying, *newcomers], key=lambda node: places.get(node.name, len(places)))
    joined = [node.name for node in nodes if node.name in fresh]
    if len(joined) == len(nodes):
        return None
    return Roster(
        number=now.number + 1,
        first=first,
        nodes=nodes,
        joined=joined,
        incarnations={name: its.incarnation for name, its in known.items()},
        order=order,
    )


def led_roster(
    now: Roster,
    first: int,
    lost: Collection[str],
    order: Order | None,
    returning: Sequence[NodeConfig] = (),
) -> Roster | None:
    """What follows ``now`` where a server holds the model: nodes have nothing of their own to continue from.

    The result is None where no node stays.
    """
    available = {
        node.name: AvailableModels(incarnation="0" * 16, oldest=first, newest=first) for node in now.nodes
    }
    after = next_roster(now, available, lost, order, returning)
    return None if after is None else after.model_copy(update={"incarnations": {}})


def check_change(
    now: Roster,
    after: Roster,
    membership: MembershipConfig,
    former: Mapping[str, NodeConfig] | None = None,
) -> None:
    """Refuses a roster that does not follow from ``now`` by an order, or as the file allows.

    The file may allow to leave out lost members, and to take in ``former`` ones that no order has removed.
    """
    former = former or {}
    names, order = after.names, after.order
    follows = after.first >= now.first if order is None or order.to is None else after.first == order.to
    if after.number != now.number + 1 or not follows:
        raise HoldfastError(f"roster {after.number} from round {after.first} does not follow {now.number}")
    if len(set(names)) < len(names) or not set(after.joined) < set(names):
        raise HoldfastError(f"roster {after.number}: names twice, or nobody who has a model")
    if order is not None and order.roster != now.number:
        raise HoldfastError(f"roster {after.number}: its order is for roster {order.roster}")
    ordered = {order.name, *order.also} if order is not None else set()
    adds = ordered if order is not None and order.change == "add" else set()
    back = set(former) & set(after.joined) if membership.rejoin else set()
    if added := sorted(set(names) - set(now.names) - adds - back):
        raise HoldfastError(f"roster {after.number}: nobody has ordered {added[0]!r} to be added")
    if order is not None and order.node is not None and not _carries_out(after, order):
        raise HoldfastError(f"roster {after.number} does not do what its order says ({order.change})")
    known = {**former, **{node.name: node for node in now.nodes}}
    if order is not None and order.newcomer is not None:
        known[order.name] = order.newcomer
    if changed := [node.name for node in after.nodes if node != known[node.name]]:
        raise HoldfastError(f"roster {after.number}: {changed[0]!r} is not as it was, and no order says so")
    lost = set(now.names) - set(names) - ordered
    if lost and membership.remove_after is None:
        raise HoldfastError(f"roster {after.number}: {sorted(lost)[0]!r} is left out, and no order says so")
    if len(names) < membership.minimum:
        raise HoldfastError(f"roster {after.number}: {len(names)} members are fewer than membership.minimum")


def _carries_out(after: Roster, order: Order) -> bool:
    """Whether the member that the order is about is out, or begins again."""
    if order.newcomer is None:
        return order.removed.isdisjoint(after.names)
    return order.name in after.names and order.name in after.joined


def as_json(document: BaseModel) -> dict[str, Any]:
    """What ``document`` is written as."""
    return document.model_dump(mode="json")
