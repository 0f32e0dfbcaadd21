"""The links of the nodes that one rank holds: which rows cross to other ranks, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from holdfast.engines.cluster.placement import Nodes, owners
from holdfast.engines.cluster.ranks import collective
from holdfast.engines.common.links import StackedLinks
from holdfast.engines.common.products import Matrix
from holdfast.topology import Network


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
