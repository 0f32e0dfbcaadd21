"""Exchange in the simulator: all rows live in one tensor, so mixing is a matrix product."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import torch
from scipy.sparse import csr_array
from torch import Tensor

from holdfast.topology import Network
from holdfast.tree import row_size, tree_map

M = TypeVar("M")

# From this many nodes on, a graph with few links is mixed as a sparse matrix.
SPARSE_FROM_NODES = 512
SPARSE_BELOW_DENSITY = 0.05


@dataclass
class Traffic:
    """Numbers sent so far, each counted once per message."""

    numbers: int = 0


@dataclass
class StackedPeers:
    """Every node's links; messages are ``[n, d]``."""

    network: Network
    like: Tensor  # device and dtype of the messages
    traffic: Traffic = field(default_factory=Traffic)

    def exchange(self, message: M) -> StackedInbox[M]:
        self.traffic.numbers += self.network.directed_links * row_size(message)
        return StackedInbox(message, self)

    @cached_property
    def degree(self) -> Tensor:
        """Number of neighbours, [n, 1]; behind a server everybody is everybody's neighbour."""
        nodes = self.network.nodes
        degrees = [nodes - 1] * nodes if self.network.is_server else self.network.degrees
        return torch.as_tensor(degrees).to(self.like)[:, None]

    @cached_property
    def weights(self) -> Tensor:
        """W, [n, n], dense or sparse, whichever multiplies faster."""
        return self._matrix(self.network.weights)

    @cached_property
    def adjacency(self) -> Tensor:
        """1 on links, 0 elsewhere, [n, n]."""
        return self._matrix(self.network.adjacency)

    def _matrix(self, matrix: csr_array) -> Tensor:
        nodes = self.network.nodes
        if nodes >= SPARSE_FROM_NODES and matrix.nnz < SPARSE_BELOW_DENSITY * nodes**2:
            rows, columns, values = map(torch.as_tensor, (matrix.indptr, matrix.indices, matrix.data))
            return torch.sparse_csr_tensor(rows, columns, values, (nodes, nodes)).to(self.like)
        return torch.as_tensor(matrix.toarray()).to(self.like)


@dataclass(frozen=True)
class StackedInbox(Generic[M]):
    """What every node received in one exchange."""

    sent: M
    peers: StackedPeers

    @cached_property
    def mixed(self) -> M:
        if self.peers.network.is_server:
            return tree_map(lambda t: t.mean(0, keepdim=True).expand_as(t), self.sent)
        return tree_map(lambda t: self.peers.weights @ t, self.sent)

    @cached_property
    def neighbour_sum(self) -> M:
        if self.peers.network.is_server:
            return tree_map(lambda t: t.sum(0, keepdim=True) - t, self.sent)
        return tree_map(lambda t: self.peers.adjacency @ t, self.sent)
