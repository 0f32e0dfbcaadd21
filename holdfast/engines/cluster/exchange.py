"""The links of the nodes that one rank holds: which rows cross to other ranks, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from holdfast.contract import Inbox
from holdfast.core.errors import HoldfastError
from holdfast.core.tree import leaves, tree_map
from holdfast.core.world import World
from holdfast.engines.cluster.ranks import collective
from holdfast.engines.common.links import Matrix, StackedLinks, exact_product
from holdfast.engines.common.peers import StackedEdges, StackedPeers
from holdfast.topology import Network

# --- which rank holds which nodes -----------------------------------------------------------------------


Nodes = NDArray[np.int64]


def place(network: Network, ranks: int) -> list[Nodes]:
    """The nodes of every rank, each in ascending order; the same on all ranks.

    The nodes are cut into runs, in the order of their numbers or in that of Cuthill and McKee, which puts
    neighbours next to each other: whichever leaves fewer links between ranks.
    """
    nodes = network.nodes
    if ranks > nodes:
        raise HoldfastError(
            f"{ranks} ranks for {nodes} nodes: every rank holds at least one; start fewer ranks"
        )
    numbered = np.arange(nodes)
    if network.is_server or ranks == 1:
        return np.array_split(numbered, ranks)
    near = np.asarray(reverse_cuthill_mckee(network.adjacency.tocsr(), symmetric_mode=True), dtype=np.int64)
    choices = [[np.sort(part) for part in np.array_split(order, ranks)] for order in (numbered, near)]
    return min(choices, key=lambda blocks: crossing_links(network, blocks))


def owners(blocks: list[Nodes]) -> Nodes:
    """[n]: the rank of every node."""
    ranks = np.empty(sum(map(len, blocks)), dtype=np.int64)
    for rank, block in enumerate(blocks):
        ranks[block] = rank
    return ranks


def crossing_links(network: Network, blocks: list[Nodes]) -> int:
    """How many undirected links have their ends on different ranks."""
    ends = owners(blocks)[network.links()]
    return int((ends[:, 0] != ends[:, 1]).sum())


# --- the links of the nodes that one rank holds: which rows cross to other ranks, and how they are mixed


@dataclass(frozen=True)
class Crossing:
    """Which of this rank's rows every other rank is sent, and how many rows come from it."""

    rows: Tensor  # [s]: positions of the rows to send, ordered by the rank they go to
    sent: list[int]  # how many go to each rank
    received: list[int]  # how many come from each rank

    def start(self, tensor: Tensor) -> Arriving:
        """Sends the rows of ``tensor`` [m, d] that others need; theirs are on the way meanwhile."""
        outgoing = tensor.index_select(0, self.rows)
        incoming = outgoing.new_empty(sum(self.received), outgoing.shape[-1])
        with collective():
            work = dist.all_to_all_single(incoming, outgoing, self.received, self.sent, async_op=True)
        return Arriving(work, incoming, outgoing)


@dataclass(frozen=True)
class Arriving:
    """Rows on their way here."""

    work: dist.Work
    rows: Tensor  # [h, d], ordered by the rank they come from
    sent: Tensor  # kept alive until all is over

    def wait(self) -> Tensor:
        with collective():
            self.work.wait()
        return self.rows


@dataclass(frozen=True)
class Halo:
    """The nodes elsewhere that nodes here are linked with."""

    nodes: Nodes  # [h], ordered by rank
    crossing: Crossing


class ClusterLinks(StackedLinks):
    """Everything that the exchange over one network needs on one rank; made once per network."""

    def __init__(self, network: Network, like: Tensor, blocks: list[Nodes], rank: int) -> None:
        super().__init__(network, like)
        self.nodes, self.rank, self.ranks = blocks[rank], rank, len(blocks)
        self.owner = owners(blocks)

    @cached_property
    def degree(self) -> Tensor:
        return self.all_degrees[self._on_device(self.nodes)]

    # --- one row per node ----------------------------------------------------------------------------------

    @cached_property
    def halo(self) -> Halo:
        return self.halo_over(np.ones(len(self.network.links()), dtype=bool))

    def halo_over(self, available: NDArray[np.bool_]) -> Halo:
        """The halo of the ``available`` links, [E]."""
        own, other, link = self.network.directed
        leaving = (self.owner[own] == self.rank) & (self.owner[other] != self.rank) & available[link]
        own, other = own[leaving], other[leaving]
        there = self.owner[other] * self.network.nodes
        # Ordered by rank and node: a rank's list of rows to send is the other's list of rows to receive.
        to, sent = np.divmod(np.unique(there + own), self.network.nodes)
        source, wanted = np.divmod(np.unique(there + other), self.network.nodes)
        return Halo(wanted, self._crossing(np.searchsorted(self.nodes, sent), to, source))

    def split(self, matrix: csr_array, halo: Halo) -> tuple[Matrix, Matrix]:
        """The rows of ``matrix`` [n, n] for the nodes here: [m, m] for those here and [m, h] for the halo."""
        rows = matrix[self.nodes]
        return self._matrix(rows[:, self.nodes]), self._matrix(rows[:, halo.nodes])

    @cached_property
    def own_weights(self) -> tuple[Matrix, Matrix]:
        return self.split(self.network.weights, self.halo)

    @cached_property
    def own_adjacency(self) -> tuple[Matrix, Matrix]:
        return self.split(self.network.adjacency, self.halo)

    # --- one row per directed link -------------------------------------------------------------------------

    @cached_property
    def _directed(self) -> tuple[Nodes, Nodes]:
        """(own, other), each [e]: the directed links of the nodes here, sorted by own, then other."""
        own, other, _ = self.network.directed
        here = self.owner[own] == self.rank
        return own[here], other[here]

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        own, other = self._directed
        return self._on_device(own), self._on_device(other)

    @cached_property
    def rows(self) -> Tensor:
        return self._on_device(np.searchsorted(self.nodes, self._directed[0]))

    @cached_property
    def gathering(self) -> Matrix:
        """[m, e]: sums the rows of every node's own directed links."""
        rows = self.rows.cpu().numpy()
        shape = (len(self.nodes), len(rows))
        return self._matrix(csr_array((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=shape))

    @cached_property
    def inner_reverse(self) -> tuple[Tensor, Tensor]:
        """The links whose both ends are here, and for each where its opposite direction stands."""
        own, other = self._directed
        inside = np.flatnonzero(self.owner[other] == self.rank)
        # Sorted by the far end, a list of links is the list of the opposite ones sorted by the near end.
        opposite = inside[np.lexsort((own[inside], other[inside]))]
        return self._on_device(inside), self._on_device(opposite)

    @cached_property
    def link_crossing(self) -> tuple[Tensor, Crossing]:
        """Where what comes over links from other ranks belongs, and what crosses: one row per cut link."""
        own, other = self._directed
        cut = np.flatnonzero(self.owner[other] != self.rank)
        there = self.owner[other[cut]]
        leaving = cut[np.lexsort((own[cut], other[cut], there))]
        coming = cut[np.lexsort((other[cut], own[cut], there))]
        return self._on_device(coming), self._crossing(leaving, self.owner[other[leaving]], there)

    def _crossing(self, rows: Nodes, to: Nodes, source: Nodes) -> Crossing:
        sent, received = (np.bincount(ranks, minlength=self.ranks).tolist() for ranks in (to, source))
        return Crossing(self._on_device(rows), sent, received)

    def _on_device(self, numbers: Nodes) -> Tensor:
        return torch.as_tensor(numbers).to(self.like.device)


# --- exchange between ranks: rows that neighbours elsewhere need travel while those here are mixed ------


M = TypeVar("M")


@dataclass
class ClusterPeers(StackedPeers):
    """The links of the nodes here in one round; messages are ``[m, d]``. Traffic counts those of all."""

    links: ClusterLinks
    world: World = field(kw_only=True)

    def _deliver(self, message: M, available: NDArray[np.bool_] | None) -> Inbox[M]:
        if self.network.is_server:
            return ServerInbox(message, self.world, self.network.nodes)
        halo = self.links.halo if available is None else self.links.halo_over(available)
        arriving = [halo.crossing.start(tensor) for tensor in leaves(message)]
        return ClusterInbox(message, self.links, halo, arriving, available)

    def _edges(self) -> StackedEdges:
        return ClusterEdges(self.links, self.traffic, self.channel_run, self.link_time)


@dataclass(frozen=True)
class ServerInbox(Generic[M]):
    """What a server made of all messages."""

    sent: M
    world: World
    nodes: int

    @cached_property
    def mixed(self) -> M:
        return tree_map(lambda t: self.world.mean(t, self.nodes).expand_as(t), self.sent)

    @cached_property
    def neighbour_sum(self) -> M:
        return tree_map(lambda t: self.world.sum(t.sum(0)) - t, self.sent)


@dataclass(frozen=True)
class ClusterInbox(Generic[M]):
    """What the nodes here received in one exchange, from nodes here and elsewhere."""

    sent: M
    links: ClusterLinks
    halo: Halo
    arriving: list[Arriving]  # one for each tensor of the message
    available: NDArray[np.bool_] | None  # [E]: the links that took part; None: all

    @cached_property
    def mixed(self) -> M:
        if self.available is None:
            return self._product(*self.links.own_weights)
        return self._product(*self.links.split(self.links.network.weights_over(self.available), self.halo))

    @cached_property
    def neighbour_sum(self) -> M:
        assert self.available is None, "sporadic methods use mixed"
        return self._product(*self.links.own_adjacency)

    def _product(self, here: Matrix, there: Matrix) -> M:
        mixed = tree_map(lambda t: exact_product(here, t), self.sent)  # while the others' rows are on the way
        arriving = iter(self.arriving)
        return tree_map(lambda t: t + exact_product(there, next(arriving).wait()), mixed)


@dataclass(frozen=True)
class ClusterEdges(StackedEdges):
    """One row per directed link of the nodes here, [e, d]."""

    links: ClusterLinks

    def _swapped(self, z: Tensor) -> Tensor:
        places, crossing = self.links.link_crossing
        arriving = crossing.start(z)
        inside, opposite = self.links.inner_reverse
        received = torch.empty_like(z)
        received[inside] = z[opposite]
        received[places] = arriving.wait()
        return received
